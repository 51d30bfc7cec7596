/* Selected images, and all images as a table. */

function setLassoMode(on) {
  state.lassoMode = on;
  state.lasso = null;
  $("lasso").ariaPressed = on;
  canvas.classList.toggle("drawing", on);
  redraw();
}

function endLasso() {
  const line = new Path2D();
  for (const point of state.lasso) line.lineTo(...point);
  const inside = (i) => pen.isPointInPath(line, data.xy[2 * i], data.xy[2 * i + 1], "evenodd");
  setLassoMode(false);
  select(visibleRows().filter(inside));
}

function toggleSelected(i) {
  const selected = new Set(state.selected);
  if (!selected.delete(i)) selected.add(i);
  select([...selected]);
}

function select(members) {
  state.selected = new Set(members);
  showSelection();
  announce(`${count(members.length, "image")} selected.`);
  restyle();
}

async function showSelection() {
  const { selected } = state;
  const members = [...selected];
  await loaded(members.slice(0, GALLERY));
  if (state.selected !== selected) return;
  const more = members.length - GALLERY;
  const section = $("selection");
  section.hidden = !members.length;
  section.replaceChildren(
    make("h3", {}, `${count(members.length, "image")} selected`),
    buttons(button("Save as CSV", () => saveCsv(members)), button("Clear", () => select([]))),
    gallery(members.slice(0, GALLERY)),
    ...(more > 0 ? [note(`and ${more} more`)] : []),
    ...(served ? selectionForms(members) : []),
  );
}

/* Spreadsheets take some first characters for formulas; an apostrophe keeps them text. */
function csvCell(text) {
  const guarded = /^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(guarded) ? `"${guarded.replaceAll('"', '""')}"` : guarded;
}

function csvValue(coloring, i) {
  const value = coloring.values[i];
  if (hasClasses(coloring)) return value < 0 ? "" : csvCell(coloring.classes[value]);
  return Number.isNaN(value) ? "" : String(Number(value.toPrecision(7)));
}

/* Bytes of names that are not UTF-8, which Python reads as lone surrogates, are written as they are. */
function fileBytes(text) {
  return text.split(/([\udc80-\udcff])/u).map((part, at) => {
    return at % 2 ? Uint8Array.of(part.charCodeAt(0) - 0xdc00) : part;
  });
}

async function saveCsv(members) {
  await loaded(members);
  const head = ["number", "path", ...data.colorings.map((each) => csvCell(each.name.toLowerCase()))];
  const rows = members.map((i) => {
    const values = data.colorings.map((coloring) => csvValue(coloring, i));
    return [data.number[i], csvCell(rawName(i)), ...values];
  });
  const text = [head, ...rows].map((row) => `${row.join(",")}\n`).join("");
  const href = URL.createObjectURL(new Blob(fileBytes(`\ufeff${text}`), { type: "text/csv" }));
  make("a", { download: "selection.csv", href }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
  announce(`Saved ${count(members.length, "image")} as selection.csv.`);
}

/* ---- the table ---- */

/* The values that a column is sorted by; NaN if unknown. */
function sortKey(by) {
  if (by === "number") return (i) => data.number[i];
  if (by === "name") return rawName;
  const { classes, values } = data.colorings[by];
  if (!classes.length) return (i) => values[i];
  return (i) => (values[i] < 0 ? NaN : values[i]); // classes are in their order
}

/* Unknown values come last in either direction. */
function sortedRows() {
  const key = sortKey(state.sort.by);
  const sign = state.sort.descending ? -1 : 1;
  return visibleRows().sort((i, j) => {
    const [a, b] = [key(i), key(j)];
    const [unknownA, unknownB] = [Number.isNaN(a), Number.isNaN(b)];
    if (unknownA || unknownB) return unknownA - unknownB;
    return sign * ((a > b) - (a < b));
  });
}

function tableHeading(label, by) {
  const { by: current, descending } = state.sort;
  const sorted = by === current;
  const sort = async () => {
    state.sort = { by, descending: sorted && !descending };
    state.page = 0;
    await showTable();
    $("table").querySelector("th[aria-sort] button").focus();
  };
  const arrow = sorted ? (descending ? " ▾" : " ▴") : "";
  const order = sorted ? { ariaSort: descending ? "descending" : "ascending" } : {};
  return make("th", { scope: "col", ...order }, button(label + arrow, sort));
}

function tableRow(i) {
  const link = button(make("bdi", {}, name(i)), () => open(i));
  const cells = data.colorings.map((coloring) => make("td", {}, value(coloring, i)));
  return make("tr", {}, make("td", {}, String(data.number[i])),
    make("th", { scope: "row" }, link), ...cells);
}

async function showTable() {
  if (!$("table").open) return;
  const { page: at, sort: order } = state;
  if (order.by === "name") await loaded(allRows());
  const members = sortedRows();
  const shown = members.slice(at * TABLE_ROWS, (at + 1) * TABLE_ROWS);
  await loaded(shown);
  if (state.page !== at || state.sort !== order) return; // another page meanwhile
  const pages = Math.max(1, Math.ceil(members.length / TABLE_ROWS));
  const page = `Page ${state.page + 1} of ${pages}`;
  const head = make("tr", {}, tableHeading("Number", "number"), tableHeading("Name", "name"),
    ...data.colorings.map((coloring, at) => tableHeading(coloring.name, at)));
  const rows = shown.map(tableRow);
  const turn = (by) => async () => {
    state.page += by;
    announce(`Page ${state.page + 1} of ${pages}.`);
    await showTable();
    const [back, on] = $("table").querySelectorAll(".map-buttons button");
    ((by < 0 && !back.disabled) || on.disabled ? back : on).focus();
  };
  $("table").querySelector(".wide").replaceChildren(
    make("table", {}, make("caption", {}, "The visible images of the map"),
      make("thead", {}, head), make("tbody", {}, ...rows)),
    buttons(
      button("Previous", turn(-1), { disabled: state.page === 0 }),
      make("span", {}, page),
      button("Next", turn(1), { disabled: state.page === pages - 1 })),
  );
}
