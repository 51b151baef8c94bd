"use strict";
// Turns the headings of tables into buttons: a click sorts by that column, a second click reverses the order.
const valueOf = (row, column) => {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
};
const isEmpty = (value) => value === "" || value === "–";
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });

function sortTable(table, column, isDescending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => isEmpty(a) - isEmpty(b) || (isDescending ? compare(b, a) : compare(a, b)));
  body.append(...rows.map(([, row]) => row));
  for (const heading of table.tHead.rows[0].cells) heading.removeAttribute("aria-sort");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", isDescending ? "descending" : "ascending");
}

function makeSortable(root) {
  for (const table of root.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const order = heading.getAttribute("aria-sort");
        const isNumeric = heading.classList.contains("n");
        sortTable(table, column, order ? order === "ascending" : isNumeric);
      });
    });
  }
}
makeSortable(document);

// Shows the text of the field of a confusion matrix under the pointer, or that was tapped.
for (const kind of ["pointerover", "click"]) {
  document.addEventListener(kind, (event) => {
    const title = event.target.closest(".matrix rect")?.querySelector("title");
    if (title) title.closest("figure").querySelector(".readout").textContent = title.textContent;
  });
}

// Printing opens all collapsed parts except the table of all classes, which can have thousands of rows.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not(.all-classes)")) details.open = true;
});
