"use strict";
// A live page asks for its version now and then. When it is another, the new content takes the place of the old one, and the
// reader finds it as they left it: at the same place, sorted, unfolded and focused as before.
const LIVE = document.querySelector(".live");
const EVERY = 2000; // milliseconds
const LIVES = LIVE.textContent;
let version = LIVE.dataset.version;

// An element of the new content is that of the old one which has the same words, the second of these the second, and so on.
const wordsOf = (part) => part.querySelector("caption, summary, figcaption strong")?.textContent ?? part.textContent;
function named(root, selector) {
  const found = new Map();
  for (const part of root.querySelectorAll(selector)) {
    let name = `${part.tagName} ${wordsOf(part)}`;
    while (found.has(name)) name += " again";
    found.set(name, part);
  }
  return found;
}

function inBoth(before, after, selector, bring) {
  const fresh = named(after, selector);
  for (const [name, old] of named(before, selector)) if (fresh.has(name)) bring(old, fresh.get(name));
}

function bringOrder(before, after) {
  inBoth(before, after, "table.sortable", (old, fresh) => {
    const column = [...old.tHead.rows[0].cells].findIndex((heading) => heading.ariaSort);
    if (column >= 0) sort(fresh, column, old.tHead.rows[0].cells[column].ariaSort === "descending");
  });
  inBoth(before, after, "details", (old, fresh) => (fresh.open = old.open));
}

function bringPlace(before, after, put) {
  const PARTS = "h1, h2, h3, h4, figure, .scroll";
  const CONTROLS = "button, .scroll, summary, a";
  const places = new Map();
  for (const [name, part] of named(before, PARTS)) {
    places.set(name, { top: part.getBoundingClientRect().top, within: [part.scrollLeft, part.scrollTop] });
  }
  const focused = [...named(before, CONTROLS)].find(([, part]) => part === document.activeElement)?.[0];
  put();
  const kept = [...named(after, PARTS)].filter(([name]) => places.has(name));
  for (const [name, part] of kept) [part.scrollLeft, part.scrollTop] = places.get(name).within;
  const distance = ([name]) => Math.abs(places.get(name).top);
  const [name, nearest] = kept.sort((a, b) => distance(a) - distance(b))[0] ?? [];
  if (nearest && scrollY > 0) {
    scrollBy({ top: nearest.getBoundingClientRect().top - places.get(name).top, behavior: "instant" });
  }
  if (focused) named(after, CONTROLS).get(focused)?.focus({ preventScroll: true });
}

function replace(page) {
  const before = document.querySelector("main");
  const after = document.adoptNode(page.querySelector("main"));
  makeSortable(after);
  bringOrder(before, after);
  bringPlace(before, after, () => before.replaceWith(after));
  document.title = page.title;
  version = page.querySelector(".live").dataset.version;
}

function sayWhen() {
  for (const moment of document.querySelectorAll("time")) {
    const seconds = Math.max(0, Math.round((Date.now() - Date.parse(moment.dateTime)) / 1000));
    const [count, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [seconds / 60, "min"] : [seconds / 3600, "h"];
    moment.textContent = `${Math.floor(count)} ${unit} ago`;
  }
}

const ask = async (path) => {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status);
  return answer.text();
};
const say = (words) => {
  if (LIVE.textContent !== words) LIVE.textContent = words; // a screen reader speaks of what changes
};

async function look() {
  const began = performance.now();
  try {
    const isReading = !getSelection().isCollapsed; // words that are selected would be lost
    if (!document.hidden && !isReading && (await ask("/version")) !== version) {
      replace(new DOMParser().parseFromString(await ask("/"), "text/html"));
    }
    say(LIVES);
  } catch {
    say("No longer live: longtail watch has ended, or cannot be reached.");
  }
  sayWhen();
  setTimeout(look, Math.max(EVERY, 5 * (performance.now() - began))); // a large page is looked after less often
}
sayWhen();
setTimeout(look, EVERY);
