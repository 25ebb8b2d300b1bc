"""The report as one HTML page: offline, readable without JavaScript, the same bytes each time."""
