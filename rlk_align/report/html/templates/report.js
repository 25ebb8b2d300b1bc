"use strict";
// The page is whole without this: it adds the theme, sorting, filters, linked selection and keys.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  for (const part of all("[data-script]")) part.hidden = false;

  // Theme: the system's, until the button is pressed.
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const dark = () =>
    root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
  const nameTheme = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    nameTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();

  // Sorting: numbers by data-v, all else as text; equal rows keep their order.
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };
  const compare = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
  };
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent.trim();
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const falling = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [value(row, column), row]);
        // What has no figure stays at the end, whichever way.
        const known = ([v]) => v !== "" && v !== "–" && !Number.isNaN(v);
        const sorted = rows.filter(known).sort(([a], [b]) => compare(a, b) * (falling ? -1 : 1));
        body.append(...[...sorted, ...rows.filter((r) => !known(r))].map(([, row]) => row));
      });
    });
  }

  // Filters of the table of operators.
  const words = document.getElementById("filter-text");
  const state = document.getElementById("filter-state");
  const count = document.getElementById("filter-count");
  const operators = all("#operators-table tbody tr");
  const filter = () => {
    const wanted = words.value.trim().toLowerCase();
    let shown = 0;
    for (const row of operators) {
      const kept =
        (!wanted || row.textContent.toLowerCase().includes(wanted)) &&
        (!state.value || state.value.split(" ").includes(row.dataset.state));
      row.hidden = !kept;
      shown += kept ? 1 : 0;
    }
    count.textContent = `${shown} of ${operators.length} shown`;
  };
  if (words) {
    words.addEventListener("input", filter);
    state.addEventListener("change", filter);
    filter();
  }

  // One operator is selected everywhere at once: chart, heat map and table.
  const select = (number, from) => {
    for (const part of all("[data-op]")) {
      part.classList.toggle("on", part.dataset.op === number);
      if (part.tagName === "TR") part.setAttribute("aria-selected", part.dataset.op === number);
    }
    const row = document.getElementById(`op-${number}`);
    if (!row) return;
    if (row.hidden) {
      words.value = "";
      state.value = "";
      filter();
    }
    if (from !== row) row.scrollIntoView({ block: "center" });
  };
  document.addEventListener("click", (event) => {
    const mark = event.target.closest("a[data-op]");
    if (mark) {
      event.preventDefault();
      select(mark.dataset.op, mark);
      document.getElementById(`op-${mark.dataset.op}`).focus({ preventScroll: true });
      return;
    }
    const row = event.target.closest("tr[data-op]");
    if (row && !event.target.closest("details")) select(row.dataset.op, row);
  });
  document.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-op]");
    if (!row || event.target !== row) return;
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) {
      let next = row[step];
      while (next && next.hidden) next = next[step];
      if (next) {
        event.preventDefault();
        select(next.dataset.op, next);
        next.focus();
      }
    } else if (event.key === "Enter") {
      select(row.dataset.op, row);
    } else if (event.key === "Escape") {
      document.getElementById(`cell-${row.dataset.op}`)?.focus();
    }
  });

  // A chart is one stop of the Tab key; arrows walk inside of it. What is pointed at is said below.
  for (const group of all("[data-roving]")) {
    const items = [...group.children];
    const readout = group.closest("figure")?.querySelector(".readout");
    const say = (item) => {
      if (readout && item) readout.textContent = item.querySelector("title").textContent;
    };
    const enter = (item) => {
      for (const other of items) other.setAttribute("tabindex", other === item ? "0" : "-1");
    };
    enter(items[0]);
    const grid = new Map(items.map((i) => [`${i.dataset.row},${i.dataset.column}`, i]));
    const beside = (item, key) => {
      const at = items.indexOf(item);
      if (key === "Home") return items[0];
      if (key === "End") return items[items.length - 1];
      if (key === "ArrowRight") return items[at + 1];
      if (key === "ArrowLeft") return items[at - 1];
      if (group.dataset.roving !== "grid") return undefined;
      const row = Number(item.dataset.row) + (key === "ArrowDown" ? 1 : -1);
      const next = grid.get(`${row},${item.dataset.column}`);
      return next || items.find((i) => Number(i.dataset.row) === row);
    };
    group.addEventListener("keydown", (event) => {
      const item = event.target.closest("[tabindex]");
      const keys = ["Home", "End", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"];
      if (!keys.includes(event.key)) return;
      const next = beside(item, event.key);
      if (!next) return;
      event.preventDefault();
      enter(next);
      next.focus();
    });
    group.addEventListener("focusin", (event) => say(event.target.closest("[tabindex]")));
    group.addEventListener("mouseover", (event) => say(event.target.closest("[tabindex]")));
  }

  // A link into the table, such as one that was mailed, selects its row.
  const named = /^#op-(\d+)$/.exec(location.hash);
  if (named) select(named[1], null);
})();
