// Runs in the page, and returns a line for each fault that a reader would notice.
(() => {
  const faults = [], box = (element) => element.getBoundingClientRect();
  const seen = (element) => box(element).width > 0 && getComputedStyle(element).visibility !== "hidden";
  const over = (a, b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  const pairs = (elements, what) => elements.forEach((one, i) => elements.slice(i + 1).forEach((other) => {
    if (over(box(one), box(other))) faults.push(`${what}: ${one.textContent} over ${other.textContent}`);
  }));
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page scrolls sideways");
  const scroll = document.querySelector(".scroll");
  if (scroll.scrollWidth > scroll.clientWidth) faults.push("the table scrolls sideways");
  pairs([...document.querySelectorAll("header, section")].filter(seen), "parts");
  for (const chart of document.querySelectorAll(".plotly-graph-div")) {
    const mine = box(chart), texts = [...chart.querySelectorAll("text")].filter((text) => text.textContent.trim() && seen(text));
    const card = box(chart.closest("section"));
    if (mine.width < 250 || mine.height < 200 || mine.left < 0 || mine.right > innerWidth) faults.push(`${chart.id} has no room`);
    if (mine.top < card.top || mine.bottom > card.bottom || mine.width > card.width) faults.push(`${chart.id} leaves its card`);
    if (Math.abs(chart.querySelector(".main-svg").clientWidth - mine.width) > 2) faults.push(`${chart.id} does not fit its box`);
    if (!texts.length) faults.push(`${chart.id} says nothing`);
    for (const text of texts) {
      const at = box(text);
      if (at.left < mine.left - 1 || at.right > mine.right + 1 || at.top < mine.top - 1 || at.bottom > mine.bottom + 1) faults.push(`${chart.id}: ${text.textContent} leaves the chart`);
      if (parseFloat(getComputedStyle(text).fontSize) < 10) faults.push(`${chart.id}: ${text.textContent} is tiny`);
    }
    pairs(texts, chart.id);
  }
  for (const row of document.querySelectorAll("tbody tr")) {
    const cells = [...row.cells].filter((cell) => cell.textContent && seen(cell));
    pairs(cells, "cells");
    for (const cell of cells) {
      if (cell.scrollWidth > cell.clientWidth + 1) faults.push(`${cell.textContent} does not fit its cell`);
      const at = box(cell);
      if (at.left < 0 || at.right > innerWidth) faults.push(`${cell.textContent} leaves the screen`);
    }
    if (row.querySelectorAll("td.number").length !== 5) faults.push("a row without figures");
  }
  return faults;
})()
