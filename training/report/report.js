// Comfort only: values under the pointer, and sorting. The page reads without it.
for (const plot of document.querySelectorAll('.plot')) {
  const lines = JSON.parse(plot.querySelector('script').textContent);
  const hair = plot.appendChild(document.createElement('div')), tip = plot.appendChild(document.createElement('span'));
  hair.className = 'hair'; tip.className = 'tip';
  const hide = () => { hair.style.display = tip.style.display = 'none' };
  plot.addEventListener('pointerleave', hide);
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    const near = points => points.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a);
    const main = near(lines[0].points), rows = [['step', main[0]]];
    for (const line of lines) { const point = near(line.points);
      rows.push([line.name + (point[0] === main[0] ? '' : ' at ' + point[0]), point[3]]) }
    tip.replaceChildren(...rows.flatMap(row => [row.join(' '), document.createElement('br')]).slice(0, -1));
    hair.style.display = tip.style.display = 'block';
    hair.style.left = main[1] * 100 + '%'; tip.style.top = '8px';
    tip.style.left = main[1] < 0.6 ? main[1] * box.width + 10 + 'px' : '';
    tip.style.right = main[1] < 0.6 ? '' : (1 - main[1]) * box.width + 10 + 'px';
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
