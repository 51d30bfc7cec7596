/* The order of images, and all that are visible as a table. */

/* The values that images are sorted by; NaN if unknown. */
function sortKey(by) {
  if (by === "number") return (i) => data.number[i];
  if (by === "name") return rawName;
  const { values } = data.colorings[by];
  // Classes are in their order.
  return hasClasses(data.colorings[by]) ? (i) => (values[i] < 0 ? NaN : values[i]) : (i) => values[i];
}

/* Names by the value of their numbers: 2 before 10. */
const byName = new Intl.Collator("en", { numeric: true });

/* Sorts as the reader has chosen; unknown values come last in either direction. */
async function sorted(members) {
  const { by, descending } = state.sort;
  if (by === "name") await loaded(members);
  const [key, sign] = [sortKey(by), descending ? -1 : 1];
  if (by === "name") return members.sort((i, j) => sign * byName.compare(key(i), key(j)));
  return members.sort((i, j) => {
    const [a, b] = [key(i), key(j)];
    const [unknownA, unknownB] = [Number.isNaN(a), Number.isNaN(b)];
    if (unknownA || unknownB) return unknownA - unknownB;
    return sign * ((a > b) - (a < b));
  });
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

/* Buttons that turn pages: `turn` shows another one, after which the focus is where it was. */
function pager(section, at, pages, turn) {
  const step = (by) => async () => {
    announce(`Page ${at + by + 1} of ${pages}.`);
    await turn(at + by);
    const [back, on] = section.querySelectorAll(".map-turn");
    ((by < 0 && !back.disabled) || on.disabled ? back : on).focus();
  };
  const turner = (label, by, disabled) => button(label, step(by), { className: "map-turn", disabled });
  return buttons(
    turner("Previous", -1, at === 0),
    make("span", {}, `Page ${at + 1} of ${pages}`),
    turner("Next", 1, at === pages - 1));
}

const table = { page: 0, asked: null };

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

async function showTable() {
  if (!$("table").open) return;
  const asked = table.asked = {};
  const members = await sorted(visibleRows());
  const pages = Math.max(1, Math.ceil(members.length / TABLE_PAGE));
  table.page = Math.min(table.page, pages - 1);
  const shown = members.slice(table.page * TABLE_PAGE, (table.page + 1) * TABLE_PAGE);
  await loaded(shown);
  if (table.asked !== asked) return; // another page meanwhile
  const head = make("tr", {}, tableHeading("Number", "number"), tableHeading("Name", "name"),
    ...data.colorings.map((coloring, at) => tableHeading(coloring.name, at)));
  const turn = (to) => { table.page = to; return showTable(); };
  $("table").querySelector(".wide").replaceChildren(
    make("table", {}, make("caption", {}, "The visible images of the map"),
      make("thead", {}, head), make("tbody", {}, ...shown.map(tableRow))),
    pager($("table"), table.page, pages, turn),
  );
}
