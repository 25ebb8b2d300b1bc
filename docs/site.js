// Names the search dialog, and lets the keyboard scroll wide tables.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
const reachable = () => document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class])").forEach((box) => {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
});
addEventListener("load", reachable);
addEventListener("resize", reachable);
