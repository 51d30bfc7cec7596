/* The same images as a table. */

function column(by) {
  if (by === "number") return (i) => data.number[i];
  if (by === "name") return (i) => data.names[i];
  const coloring = data.colorings[by];
  if (!byClass(coloring)) return (i) => coloring.values[i];
  return (i) => (coloring.values[i] < 0 ? NaN : coloring.classes[coloring.values[i]]);
}

/* What is not known comes last, whichever way the rest is sorted. */
function sorted() {
  const of = column(state.sort.by);
  const sign = state.sort.falls ? -1 : 1;
  return allShown().sort((i, j) => {
    const [a, b] = [of(i), of(j)];
    const [noA, noB] = [Number.isNaN(a), Number.isNaN(b)];
    if (noA || noB) return noA - noB;
    return sign * ((a > b) - (a < b));
  });
}

function heading(said, by) {
  const here = state.sort.by === by;
  const sorts = () => {
    state.sort = { by, falls: here && !state.sort.falls };
    state.page = 0;
    showTable();
    $("table").querySelector(`th[aria-sort] button`).focus();
  };
  const arrow = here ? (state.sort.falls ? " ▾" : " ▴") : "";
  const order = here ? { "aria-sort": state.sort.falls ? "descending" : "ascending" } : {};
  return make("th", { scope: "col", ...order }, button(said + arrow, sorts));
}

function row(i) {
  const called = button(make("bdi", {}, name(i)), () => open(i));
  const cells = data.colorings.map((coloring) => make("td", {}, value(coloring, i)));
  return make("tr", {}, make("td", {}, String(data.number[i])),
    make("th", { scope: "row" }, called), ...cells);
}

function showTable() {
  if (!$("table").open) return;
  const members = sorted();
  const pages = Math.max(1, Math.ceil(members.length / ROWS));
  const head = make("tr", {}, heading("Number", "number"), heading("Name", "name"),
    ...data.colorings.map((coloring, at) => heading(coloring.name, at)));
  const rows = members.slice(state.page * ROWS, (state.page + 1) * ROWS).map(row);
  const turn = (by) => () => {
    state.page = Math.min(pages - 1, Math.max(0, state.page + by));
    showTable();
    say(`Page ${state.page + 1} of ${pages}.`);
  };
  $("table").querySelector(".wide").replaceChildren(
    make("table", {}, make("caption", {}, "The images that the map shows"),
      make("thead", {}, head), make("tbody", {}, ...rows)),
    make("div", { className: "map-buttons" },
      button("Previous", turn(-1), { disabled: state.page === 0 }),
      make("span", {}, `Page ${state.page + 1} of ${pages}`),
      button("Next", turn(1), { disabled: state.page === pages - 1 })),
  );
}

function servedSelection() { return []; }
