/* Images that were chosen. */

function drawing(on) {
  state.drawing = on;
  state.lasso = null;
  $("lasso").setAttribute("aria-pressed", String(on));
  canvas.classList.toggle("drawing", on);
  redraw();
}

/* Even and odd crossings of a ray tell inside from outside. */
function encloses(line, x, y) {
  let within = false;
  line.forEach(([x1, y1], at) => {
    const [x2, y2] = line[(at || line.length) - 1];
    if ((y1 > y) !== (y2 > y) && x < x1 + ((y - y1) / (y2 - y1)) * (x2 - x1)) within = !within;
  });
  return within;
}

function endLasso() {
  const line = state.lasso;
  const within = (i) => encloses(line, data.xy[2 * i], data.xy[2 * i + 1]);
  drawing(false);
  select(allShown().filter(within));
}

function toggle(i) {
  const selected = new Set(state.selected);
  if (!selected.delete(i)) selected.add(i);
  select([...selected]);
}

function select(members) {
  state.selected = new Set(members);
  showSelection();
  say(`${count(members.length, "image")} selected.`);
  redraw();
}

function showSelection() {
  const members = [...state.selected];
  const section = $("selection");
  section.hidden = !members.length;
  section.replaceChildren(
    make("h3", {}, `${count(members.length, "image")} selected`),
    make("div", { className: "map-buttons" },
      button("Save as CSV", () => save(members)), button("Clear", () => select([]))),
    gallery(members.slice(0, GALLERY)),
    ...(members.length > GALLERY
      ? [make("p", { className: "note" }, `and ${members.length - GALLERY} more`)] : []),
    ...(served ? servedSelection(members) : []),
  );
}

/* Spreadsheets take some beginnings for formulas; an apostrophe keeps them text. */
function cell(text) {
  const guarded = /^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(guarded) ? `"${guarded.replaceAll('"', '""')}"` : guarded;
}

function plain(coloring, i) {
  const of = coloring.values[i];
  if (byClass(coloring)) return of < 0 ? "" : cell(coloring.classes[of]);
  return Number.isNaN(of) ? "" : String(Number(of.toPrecision(7)));
}

function save(members) {
  const rows = members.map((i) => {
    return [data.number[i], cell(data.names[i]), ...data.colorings.map((each) => plain(each, i))];
  });
  const head = ["number", "path", ...data.colorings.map((each) => cell(each.name.toLowerCase()))];
  const text = [head, ...rows].map((row) => `${row.join(",")}\n`).join("");
  const link = make("a", { download: "selection.csv" });
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say(`Saved ${count(members.length, "image")} as selection.csv.`);
}
