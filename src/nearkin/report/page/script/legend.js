/* Which images are visible, and what their colors mean. */

let searchTexts = null; // what the filter searches, made when it is first used

function searchText(i) {
  const classes = data.colorings.filter(hasClasses).map((coloring) => value(coloring, i));
  return [rawName(i), ...classes].join("\n").toLowerCase();
}

async function updateVisible() {
  const filter = state.filter.trim().toLowerCase();
  if (filter && !searchTexts) {
    $("count").textContent = "Reading names …";
    await loaded(allRows());
    if (filter !== state.filter.trim().toLowerCase()) return;
    searchTexts ??= allRows().map(searchText);
  }
  let total = 0;
  for (let i = 0; i < data.count; i++) {
    const matches = !filter || searchTexts[i].includes(filter);
    state.visible[i] = !state.hiddenClasses.has(classOf(i)) && matches;
    total += state.visible[i];
  }
  const all = count(data.count, "image");
  $("count").textContent = total === data.count ? all : `${total.toLocaleString("en")} of ${all}`;
  state.page = 0;
  showTable();
  restyle();
}

function setColoring(at) {
  state.coloring = at;
  state.hiddenClasses.clear();
  state.highlighted = null;
  $("note").textContent = currentColoring()?.note ?? "";
  updateLook();
  showLegend();
  updateVisible();
}

function showLegend() {
  const coloring = currentColoring();
  $("legend").replaceChildren();
  if (!coloring) return;
  const entries = hasClasses(coloring) ? classLegend(coloring) : scaleLegend(coloring);
  $("legend").append(make("h3", {}, coloring.name), ...entries);
}

function classLegend(coloring) {
  const sizes = new Map();
  for (let i = 0; i < data.count; i++) sizes.set(classOf(i), (sizes.get(classOf(i)) ?? 0) + 1);
  const classes = [...coloring.classes.keys(), -1].filter((each) => sizes.has(each));
  const entries = classes.map((each) => legendEntry(coloring, each, sizes.get(each)));
  const hide = (hidden) => () => {
    state.hiddenClasses = new Set(hidden);
    for (const entry of entries) entry.ariaPressed = !hidden.length;
    updateVisible();
  };
  const all = [button("Show all", hide([])), button("Hide all", hide(classes))];
  return [
    note("Click a class to hide or show it."),
    make("ul", {}, ...entries.map((entry) => make("li", {}, entry))),
    buttons(...(classes.length > 2 ? all : [])),
  ];
}

function legendEntry(coloring, each, size) {
  const label = each < 0 ? "unknown" : escapeInvisible(coloring.classes[each]);
  const entry = button("", () => {
    if (!state.hiddenClasses.delete(each)) state.hiddenClasses.add(each);
    entry.ariaPressed = !state.hiddenClasses.has(each);
    updateVisible();
  }, { ariaPressed: !state.hiddenClasses.has(each) });
  const highlight = (highlighted) => () => { state.highlighted = highlighted; restyle(); };
  entry.onpointerenter = entry.onfocus = highlight(each);
  entry.onpointerleave = entry.onblur = highlight(null);
  entry.append(legendMark(each), make("bdi", {}, label), make("span", {}, size.toLocaleString("en")));
  return entry;
}

function legendMark(each) {
  const mark = make("canvas", { width: 32, height: 32, className: "sample" });
  const brush = mark.getContext("2d");
  brush.fillStyle = each < 0 ? theme.quiet : theme.classes[each % COLORS];
  brush.setTransform(10, 0, 0, 10, 16, 16);
  brush.fill(SHAPES[Math.max(0, each) % SHAPES.length]);
  return mark;
}

function scaleLegend(coloring) {
  const scale = make("div", { className: "scale" });
  scale.style.background = `linear-gradient(to right, ${theme.scale})`;
  const ends = range(coloring).map((end) => make("span", {}, end.toFixed(2)));
  const unknown = coloring.values.some(Number.isNaN) ? [note(legendMark(-1), " unknown")] : [];
  return [scale, make("div", { className: "ends" }, ...ends), ...unknown];
}
