// Measures a page in a frame: elements that extend beyond it, overlap, scroll, load or fail, and the tooltip.
const textOf = element => element.textContent.trim();
const boxOf = element => element.getBoundingClientRect();
const visible = element => boxOf(element).width > 0;
const beyond = (page, view, width) => [...page.querySelectorAll('body *')].filter(element => {
  let scrolls = false;
  for (let box = element.parentElement; box; box = box.parentElement)
    scrolls ||= view.getComputedStyle(box).overflowX === 'auto';
  return !scrolls && visible(element) && boxOf(element).right > width + 1;
}).map(element => element.tagName + '.' + element.className);
// Labels of one side that cover each other: [selector, start, end].
const SIDES = [['.x, .unit', box => box.left, box => box.right], ['.y', box => box.top, box => box.bottom]];
const covered = plots => plots.flatMap(plot => SIDES.flatMap(([names, start, end]) => {
  const labels = [...plot.querySelectorAll(names)].map(label => ({ text: textOf(label), box: boxOf(label) }));
  labels.sort((a, b) => start(a.box) - start(b.box));
  return labels.slice(1).filter((label, place) => start(label.box) < end(labels[place].box)).map(label => label.text);
}));
const outside = page => [...page.querySelectorAll('.plot span:not(.tip), .band span')].filter(label => {
  const own = boxOf(label), card = boxOf(label.closest('.card'));
  return own.left < card.left + 4 || own.right > card.right - 1;
}).map(textOf);
const tipOf = (plot, view) => {
  const box = boxOf(plot), at = { clientX: box.right - 1, clientY: box.top + 9, bubbles: true };
  plot.dispatchEvent(new view.PointerEvent('pointermove', at));
  const tip = plot.querySelector('.tip'), place = boxOf(tip), text = tip.innerText;
  const within = place.left >= 0 && place.right <= view.document.documentElement.clientWidth;
  for (const key of ['Home', 'ArrowRight']) plot.dispatchEvent(new view.KeyboardEvent('keydown', { key }));
  const keys = tip.innerText;
  plot.dispatchEvent(new view.PointerEvent('pointerleave'));
  return { text, within, keys, gone: !visible(tip) };
};
const reach = frame => {
  const page = frame.contentDocument, view = frame.contentWindow, width = page.documentElement.clientWidth;
  const tiles = [...page.querySelectorAll('.tile')].map(boxOf), bottom = Math.max(...tiles.map(box => box.bottom));
  const right = boxes => Math.max(...boxes.map(box => box.right));
  const wide = box => box.scrollWidth > box.clientWidth + 1;
  page.querySelector('.layouts th:last-child button')?.click();
  return {
    name: frame.name, width, across: page.documentElement.scrollWidth,
    beyond: beyond(page, view, width).slice(0, 5), outside: outside(page),
    covered: covered([...page.querySelectorAll('.plot, .band')]),
    unnamed: [...page.querySelectorAll('svg[role=img]')].filter(svg => !svg.getAttribute('aria-label') &&
      !(svg.querySelector('title') && svg.querySelector('desc'))).length,
    errors: view.messages, tip: page.querySelector('.plot') && tipOf(page.querySelector('.plot'), view),
    sorted: [...page.querySelectorAll('.layouts tbody td.number')].map(cell => Number(cell.dataset.sort)),
    tallest: Math.max(...tiles.map(box => box.height)),
    ragged: right(tiles) - right(tiles.filter(box => box.bottom === bottom)),
    scrolling: [...page.querySelectorAll('.scroll, .schedule')].filter(wide).map(box => box.className),
    pictured: page.querySelector('.schedule')?.shadowRoot?.querySelector('svg').getBoundingClientRect().height ?? 0,
    loads: performance.getEntriesByType('resource').length + view.performance.getEntriesByType('resource').length,
  };
};
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(reach);
  document.getElementById('found').textContent = JSON.stringify(found);
});
