/* The grid: images side by side, page by page, in place of the map. */

const grid = {
  on: false,
  listed: null, // { title, members() }: what it shows instead of all visible images
  rows: [], // the images of all pages, in order
  page: 0,
  tiles: new Map(), // of this page, by image
  asked: null,
};

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
  const asked = grid.asked = {};
  const members = grid.listed ? grid.listed.members().filter((i) => state.visible[i]) : visibleRows();
  const rows = await sorted(members);
  const pages = Math.max(1, Math.ceil(rows.length / GRID_PAGE));
  grid.page = Math.min(grid.page, pages - 1);
  const shown = rows.slice(grid.page * GRID_PAGE, (grid.page + 1) * GRID_PAGE);
  await loaded(shown);
  if (grid.asked !== asked) return; // another page meanwhile
  const same = shown.length && [...grid.tiles.keys()].join() === shown.join();
  const top = same ? $("grid").scrollTop : 0;
  grid.rows = rows;
  grid.tiles = new Map(shown.map((i) => [i, button(tile(i), null, { title: name(i) })]));
  for (const [i, item] of grid.tiles) {
    item.dataset.row = i;
    item.append(make("span"));
  }
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
  const orders = [["number", "Number"], ["name", "Name"],
    ...data.colorings.map((coloring, at) => [at, coloring.name])];
  const order = make("select", { ariaLabel: "Sort by", onchange: (event) => {
    const { value: chosen } = event.target;
    setSort(chosen in data.colorings ? Number(chosen) : chosen, descending);
  } }, ...orders.map(([value, label]) => make("option", { value, selected: value === by }, label)));
  const all = button("Show all visible", () => { grid.listed = null; grid.page = 0; showGrid(); });
  const turn = (to) => { grid.page = to; return showGrid(); };
  return make("div", { className: "map-grid-head" },
    make("h3", {}, `${listed?.title ?? "Visible images"}: ${rows.length.toLocaleString("en")}`),
    buttons(
      ...(listed ? [all] : []),
      "Sort by", order,
      button(descending ? "▾" : "▴", () => setSort(by, !descending), { ariaLabel: "Reverse the order" }),
      button("Select all", (event) => select(grid.rows, selectionMode(event))),
      pager($("grid"), grid.page, pages, turn)));
}

/* What changes on tiles: whether they are selected, their labels, and which one Tab leads to. */
function markTiles() {
  const coloring = currentColoring();
  const entry = grid.tiles.has(state.cursor) ? state.cursor : grid.tiles.keys().next().value;
  for (const [i, item] of grid.tiles) {
    const label = labelOf(i);
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
    const ends = [Math.max(0, grid.rows.indexOf(state.cursor)), grid.rows.indexOf(i)];
    const [from, to] = ends.sort((a, b) => a - b);
    select(state.cursor >= 0 ? grid.rows.slice(from, to + 1) : [i], mode);
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
  if (row === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  state.cursor = Number(row);
  const act = GRID_KEYS[event.key] ?? labelKey(event.key);
  if (!act) return;
  act(grid.rows.indexOf(state.cursor));
  event.preventDefault();
}
