"use strict";
// A live page polls its version. When the version changes, the new content replaces the old one, and the scroll position, the
// order of tables, open details and the focus are restored.
const STATUS = document.querySelector(".live");
const INTERVAL = 2000; // milliseconds
const LIVE_TEXT = STATUS.textContent;
let version = STATUS.dataset.version;

// Elements of the old and new content correspond if they have the same tag and text; duplicates correspond in their order.
const labelOf = (element) => element.querySelector("caption, summary, figcaption strong")?.textContent ?? element.textContent;
function elementsByKey(root, selector) {
  const found = new Map();
  for (const element of root.querySelectorAll(selector)) {
    let key = `${element.tagName} ${labelOf(element)}`;
    while (found.has(key)) key += " (next)";
    found.set(key, element);
  }
  return found;
}

function forEachPair(before, after, selector, restore) {
  const current = elementsByKey(after, selector);
  for (const [key, old] of elementsByKey(before, selector)) if (current.has(key)) restore(old, current.get(key));
}

function restoreTablesAndDetails(before, after) {
  forEachPair(before, after, "table.sortable", (old, current) => {
    const column = [...old.tHead.rows[0].cells].findIndex((heading) => heading.ariaSort);
    if (column >= 0) sortTable(current, column, old.tHead.rows[0].cells[column].ariaSort === "descending");
  });
  forEachPair(before, after, "details", (old, current) => (current.open = old.open));
}

function replaceAndRestorePosition(before, after) {
  const SCROLLED = "h1, h2, h3, h4, figure, .scroll";
  const FOCUSABLE = "button, .scroll, summary, a";
  const positions = new Map();
  for (const [key, element] of elementsByKey(before, SCROLLED)) {
    positions.set(key, { top: element.getBoundingClientRect().top, scroll: [element.scrollLeft, element.scrollTop] });
  }
  const focused = [...elementsByKey(before, FOCUSABLE)].find(([, element]) => element === document.activeElement)?.[0];
  before.replaceWith(after);
  const kept = [...elementsByKey(after, SCROLLED)].filter(([key]) => positions.has(key));
  for (const [key, element] of kept) [element.scrollLeft, element.scrollTop] = positions.get(key).scroll;
  const distance = ([key]) => Math.abs(positions.get(key).top);
  const [key, nearest] = kept.sort((a, b) => distance(a) - distance(b))[0] ?? [];
  if (nearest && scrollY > 0) {
    scrollBy({ top: nearest.getBoundingClientRect().top - positions.get(key).top, behavior: "instant" });
  }
  if (focused) elementsByKey(after, FOCUSABLE).get(focused)?.focus({ preventScroll: true });
}

function replaceContent(page) {
  const before = document.querySelector("main");
  const after = document.adoptNode(page.querySelector("main"));
  makeSortable(after);
  restoreTablesAndDetails(before, after);
  replaceAndRestorePosition(before, after);
  document.title = page.title;
  version = page.querySelector(".live").dataset.version;
}

function showAges() {
  for (const time of document.querySelectorAll("time")) {
    const seconds = Math.max(0, Math.round((Date.now() - Date.parse(time.dateTime)) / 1000));
    const [count, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [seconds / 60, "min"] : [seconds / 3600, "h"];
    time.textContent = `${Math.floor(count)} ${unit} ago`;
  }
}

const request = async (path) => {
  const response = await fetch(path, { cache: "no-store" });
  if (!response.ok) throw new Error(response.status);
  return response.text();
};
const setStatus = (text) => {
  if (STATUS.textContent !== text) STATUS.textContent = text; // a screen reader announces every change
};

async function update() {
  const start = performance.now();
  try {
    const hasSelection = !getSelection().isCollapsed; // replacing the content would lose the selection
    if (!document.hidden && !hasSelection && (await request("/version")) !== version) {
      replaceContent(new DOMParser().parseFromString(await request("/"), "text/html"));
    }
    setStatus(LIVE_TEXT);
  } catch {
    setStatus("No longer live: longtail watch has stopped or cannot be reached.");
  }
  showAges();
  setTimeout(update, Math.max(INTERVAL, 5 * (performance.now() - start))); // large pages are updated less often
}
showAges();
setTimeout(update, INTERVAL);
