/* Selected images. */

/* How the keys that are held change a selection. */
const selectionMode = ({ shiftKey, altKey }) => (altKey ? "remove" : shiftKey ? "add" : "replace");

function setLassoMode(on) {
  state.lassoMode = on;
  state.lasso = null;
  $("lasso").ariaPressed = on;
  canvas.classList.toggle("drawing", on);
  redraw();
}

function endLasso(mode) {
  const line = new Path2D();
  for (const point of state.lasso) line.lineTo(...point);
  const inside = (i) => pen.isPointInPath(line, data.xy[2 * i], data.xy[2 * i + 1], "evenodd");
  setLassoMode(false);
  select(visibleRows().filter(inside), mode);
}

function toggleSelected(i) {
  select([i], state.selected.has(i) ? "remove" : "add");
}

function select(members, mode = "replace") {
  const selected = new Set(mode === "replace" ? [] : state.selected);
  for (const i of members) {
    if (mode === "remove") selected.delete(i);
    else selected.add(i);
  }
  state.selected = selected;
  showSelection();
  markTiles();
  announce(`${count(selected.size, "image")} selected.`);
  restyle();
}

async function showSelection() {
  const { selected } = state;
  const members = [...selected];
  await loaded(members.slice(0, GALLERY));
  if (state.selected !== selected) return;
  const section = $("selection");
  section.hidden = !members.length;
  section.replaceChildren(
    make("h3", {}, `${count(members.length, "image")} selected`),
    buttons(
      button("Save as CSV", () => saveCsv(members)),
      button("Show in grid", () => list("Selected images", () => [...state.selected])),
      button("Clear", () => select([]))),
    gallery(members.slice(0, GALLERY)),
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
  if (!await loaded(members)) return;
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
