/* Lists of images, page by page: the grid, in place of the map, and the table. */

const grid = {
  on: false,
  listed: null, // { title, members() }: what it shows instead of all visible images
  rows: [], // the images of all pages, in order
  page: 0,
  tiles: new Map(), // of this page, by image
  turn: null,
};
const table = { page: 0, turn: null };

/* Names by the value of their numbers: 2 before 10. */
const byName = new Intl.Collator("en", { numeric: true });

/* Sorts as the reader has chosen; unknown values come last in either direction. */
async function sorted(members) {
  const { by, descending } = state.sort;
  const sign = descending ? -1 : 1;
  if (by === "name") {
    await loaded(members);
    return members.sort((i, j) => sign * byName.compare(rawName(i), rawName(j)));
  }
  const { values } = data.colorings[by] ?? { values: data.number };
  const known = values instanceof Float32Array ? (i) => !Number.isNaN(values[i]) : (i) => values[i] >= 0;
  return members.sort((i, j) => known(j) - known(i) || sign * (values[i] - values[j]));
}

function setSort(by, descending) {
  state.sort = { by, descending };
  turnToFirst();
  return showLists();
}

function turnToFirst() {
  grid.page = table.page = 0;
}

const showLists = () => Promise.all([showGrid(), showTable()]);

/* The images of the page that a list is at, once their names are there; null if another page has
   been asked for meanwhile. */
async function pageOf(list, members, size) {
  const turn = list.turn = {};
  const rows = await sorted(members);
  const pages = Math.max(1, Math.ceil(rows.length / size));
  list.page = Math.min(list.page, pages - 1);
  const shown = rows.slice(list.page * size, (list.page + 1) * size);
  await loaded(shown);
  return list.turn === turn ? { rows, pages, shown } : null;
}

/* Buttons that turn pages, after which the focus is where it was. */
function pager(section, list, pages, show) {
  const at = list.page;
  const turner = (label, by, disabled) => button(label, async () => {
    list.page = at + by;
    announce(`Page ${list.page + 1} of ${pages}.`);
    await show();
    const [back, on] = section.querySelectorAll(".map-turn");
    ((by < 0 && !back.disabled) || on.disabled ? back : on).focus();
  }, { className: "map-turn", disabled });
  return buttons(
    turner("Previous", -1, at === 0),
    make("span", {}, `Page ${at + 1} of ${pages}`),
    turner("Next", 1, at === pages - 1));
}

/* ---- the table ---- */

function tableHeading(label, by) {
  const { by: current, descending } = state.sort;
  const isSorted = by === current;
  const sort = async () => {
    await setSort(by, isSorted && !descending);
    $("table").querySelector("th[aria-sort] button").focus();
  };
  const arrow = isSorted ? (descending ? " ▾" : " ▴") : "";
  const order = isSorted ? { ariaSort: descending ? "descending" : "ascending" } : {};
  return make("th", { scope: "col", ...order }, button(label + arrow, sort));
}

function tableRow(i) {
  const link = button(make("bdi", {}, name(i)), () => open(i));
  const cells = data.colorings.map((coloring) => make("td", {}, value(coloring, i)));
  return make("tr", {}, make("td", {}, String(data.number[i])),
    make("th", { scope: "row" }, link), ...cells);
}

/* What images can be sorted by, with its label. */
const orders = () => [["number", "Number"], ["name", "Name"],
  ...data.colorings.map((coloring, at) => [at, coloring.name])];

async function showTable() {
  if (!$("table").open) return;
  const found = await pageOf(table, visibleRows(), TABLE_PAGE);
  if (!found) return;
  const head = make("tr", {}, ...orders().map(([by, label]) => tableHeading(label, by)));
  $("table").querySelector(".wide").replaceChildren(
    make("table", {}, make("caption", {}, "The visible images of the map"),
      make("thead", {}, head), make("tbody", {}, ...found.shown.map(tableRow))),
    pager($("table"), table, found.pages, showTable),
  );
}

/* ---- the grid ---- */

function setGrid(on) {
  grid.on = on;
  $("grid").hidden = !on;
  $("show-grid").ariaPressed = on;
  hideTip();
  if (narrow.matches) $("view").scrollIntoView({ block: "nearest" });
  return showGrid();
}

/* Shows some images, as far as the filters do. */
function list(title, members) {
  grid.listed = { title, members };
  grid.page = 0;
  return setGrid(true);
}

async function showGrid() {
  if (!grid.on) return;
  const members = grid.listed ? grid.listed.members().filter((i) => state.visible[i]) : visibleRows();
  const found = await pageOf(grid, members, GRID_PAGE);
  if (!found) return;
  const { rows, pages, shown } = found;
  const same = shown.length && [...grid.tiles.keys()].join() === shown.join();
  const top = same ? $("grid").scrollTop : 0;
  grid.rows = rows;
  grid.tiles = new Map(shown.map((i) => {
    const item = button([tile(i), make("span")], null, { title: name(i) });
    item.dataset.row = i;
    return [i, item];
  }));
  const focused = $("grid").contains(document.activeElement);
  $("grid").replaceChildren(gridHead(pages), make("div", { className: "map-images", role: "group",
    ariaLabel: "Images", onclick: clickTile, onkeydown: keydownGrid }, ...grid.tiles.values()));
  $("grid").scrollTop = top;
  markTiles();
  if (focused) grid.tiles.get(state.cursor)?.focus();
}

function gridHead(pages) {
  const { rows, listed } = grid;
  const { by, descending } = state.sort;
  const choices = orders();
  const sort = async (focused, ...order) => {
    await setSort(...order);
    $("grid").querySelector(focused).focus();
  };
  const onchange = ({ target }) => sort("select", choices[target.selectedIndex][0], descending);
  const order = make("select", { ariaLabel: "Sort by", onchange },
    ...choices.map(([each, label]) => make("option", { selected: each === by }, label)));
  const all = button("Show all visible", () => { grid.listed = null; grid.page = 0; showGrid(); });
  return make("div", { className: "map-grid-head" },
    make("h3", {}, `${listed?.title ?? "Visible images"}: ${rows.length.toLocaleString("en")}`),
    buttons(
      ...(listed ? [all] : []),
      "Sort by", order,
      button(descending ? "▾" : "▴", () => sort("select + button", by, !descending),
        { ariaLabel: "Reverse the order" }),
      button("Select all", (event) => select(grid.rows, selectionMode(event))),
      pager($("grid"), grid, pages, showGrid)));
}

/* What changes on tiles: whether they are selected, their labels, and which one Tab leads to. */
function markTiles() {
  const coloring = currentColoring();
  const entry = grid.tiles.has(state.cursor) ? state.cursor : grid.tiles.keys().next().value;
  for (const [i, item] of grid.tiles) {
    const label = escapeInvisible(rawLabel(i));
    item.lastChild.textContent = label || (coloring ? value(coloring, i) : "");
    item.classList.toggle("labeled", label !== "");
    item.ariaPressed = state.selected.has(i);
    item.ariaLabel = [describe(i), label && `labeled ${label}`].filter(Boolean).join(", ");
    item.tabIndex = i === entry ? 0 : -1;
  }
}

function clickTile(event) {
  const row = event.target.closest("button")?.dataset.row;
  if (row === undefined) return;
  const i = Number(row);
  const mode = selectionMode(event);
  if (mode === "replace") open(i, { focus: false });
  else if (mode === "remove") select([i], mode);
  else {
    const ends = [grid.rows.indexOf(state.cursor), grid.rows.indexOf(i)];
    const [from, to] = ends.sort((a, b) => a - b);
    select(from >= 0 ? grid.rows.slice(from, to + 1) : [i], mode);
  }
  state.cursor = i;
  markTiles();
}

/* Moves to an image of the grid, which the panel follows if it is open. */
async function goTo(at) {
  const to = Math.max(0, Math.min(grid.rows.length - 1, at));
  if (!grid.rows.length) return;
  state.cursor = grid.rows[to];
  const page = Math.floor(to / GRID_PAGE);
  if (page !== grid.page) {
    grid.page = page;
    await showGrid();
  }
  markTiles();
  grid.tiles.get(state.cursor)?.focus();
  if (state.open >= 0) await open(state.cursor, { focus: false });
  else announce(describe(state.cursor));
}

const columns = () => {
  return getComputedStyle($("grid").querySelector(".map-images")).gridTemplateColumns.split(" ").length;
};

const GRID_KEYS = {
  "ArrowLeft": (at) => goTo(at - 1),
  "ArrowRight": (at) => goTo(at + 1),
  "ArrowUp": (at) => goTo(at - columns()),
  "ArrowDown": (at) => goTo(at + columns()),
  "PageUp": (at) => goTo(at - GRID_PAGE),
  "PageDown": (at) => goTo(at + GRID_PAGE),
  "Home": () => goTo(0),
  "End": () => goTo(grid.rows.length - 1),
  "Enter": (at) => open(grid.rows[at], { focus: false }),
  " ": (at) => toggleSelected(grid.rows[at]),
  "Escape": () => (state.open >= 0 ? close() : setGrid(false)),
};

function keydownGrid(event) {
  const row = event.target.dataset.row;
  if (row === undefined) return;
  state.cursor = Number(row);
  pressKey(event, GRID_KEYS, grid.rows.indexOf(state.cursor));
}
