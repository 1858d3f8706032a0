// Tooltips under the pointer or with the arrow keys, and sorting. The page is complete without it.
for (const plot of document.querySelectorAll('.plot')) {
  const { lines, marks } = JSON.parse(plot.querySelector('script').textContent);
  const places = [...new Set(lines.flatMap(line => line.points.map(point => point[1])))].sort((a, b) => a - b);
  const hair = plot.appendChild(document.createElement('div')), tip = plot.appendChild(document.createElement('div'));
  hair.className = 'hair'; tip.className = 'tip'; tip.setAttribute('role', 'status');
  const near = (items, x, place) => items.reduce((a, b) => Math.abs(place(b) - x) < Math.abs(place(a) - x) ? b : a);
  let at = -1;
  const hide = () => { hair.style.display = tip.style.display = 'none'; at = -1 };
  const show = x => {
    const main = near(lines.map(line => near(line.points, x, point => point[1])), x, point => point[1]);
    at = places.indexOf(main[1]);
    const head = document.createElement('b');
    head.textContent = 'step ' + main[0].toLocaleString('en');
    const rows = lines.map(line => {
      const point = near(line.points, main[1], each => each[1]), row = document.createElement('div');
      row.className = lines.length > 1 ? 'key' : '';
      row.style.setProperty('--own', `var(--${line.color})`);
      row.textContent = [line.name, point[2], point[0] === main[0] ? '' : 'at ' + point[0]].filter(Boolean).join(' ');
      return row;
    });
    const events = marks.filter(mark => Math.abs(mark[0] - main[1]) < 0.8).slice(0, 4).map(mark => {
      const row = document.createElement('div'); row.textContent = mark[1]; return row });
    tip.replaceChildren(head, ...rows, ...events);
    hair.style.display = tip.style.display = 'block';
    hair.style.left = main[1] + '%';
    const wide = plot.clientWidth, left = main[1] / 100 * wide + 10, own = tip.offsetWidth;
    tip.style.left = Math.max(Math.min(left + own > wide ? left - own - 20 : left, wide - own), 0) + 'px';
  };
  plot.addEventListener('pointerleave', hide);
  plot.addEventListener('blur', hide);
  for (const kind of ['pointermove', 'pointerdown']) plot.addEventListener(kind, event => {
    const box = plot.getBoundingClientRect();
    show(100 * (event.clientX - box.left) / box.width);
  });
  plot.addEventListener('keydown', event => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (event.key === 'Escape') hide();
    if (!move) return;
    event.preventDefault();
    show(places[Math.max(0, Math.min(places.length - 1, (at < 0 && move > 0 ? -1 : at) + move))]);
  });
}
for (const table of document.querySelectorAll('.layouts')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener('click', () => {
    const down = head.dataset.down = head.dataset.down === '1' ? '0' : '1';
    const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const order = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    body.append(...[...body.rows].sort((a, b) => down === '1' ? order(b, a) : order(a, b)));
  }));
}
