"use strict";
// Headings of tables become buttons: a click sorts by that column, a second one the other way round.
const valueOf = (row, column) => {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
};
const isEmpty = (value) => value === "" || value === "–";
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });

function sort(table, column, falling) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => isEmpty(a) - isEmpty(b) || (falling ? compare(b, a) : compare(a, b)));
  body.append(...rows.map(([, row]) => row));
  for (const heading of table.tHead.rows[0].cells) heading.removeAttribute("aria-sort");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", falling ? "descending" : "ascending");
}

function makeSortable(root) {
  for (const table of root.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const now = heading.getAttribute("aria-sort");
        const numbers = heading.classList.contains("n");
        sort(table, column, now ? now === "ascending" : numbers);
      });
    });
  }
}
makeSortable(document);

// Paper shows what the screen has folded away, but for the table of every class, which may have thousands.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not(.every)")) part.open = true;
});
