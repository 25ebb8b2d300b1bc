"""SGLang: the requests of its scheduler, which an `Engine` and a server have in the same way."""
