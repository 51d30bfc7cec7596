/* Which images are visible, and what their colors mean. */

let searchTexts = null; // what the filter searches, made when it is first used

function searchText(i) {
  const classes = data.colorings.filter(hasClasses).map((coloring) => value(coloring, i));
  return [rawName(i), ...classes].join("\n").normalize().toLowerCase();
}

const filterInput = () => $("filter").value.trim().normalize().toLowerCase();

/* Whether a coloring that filters shows an image; a range, whose open end is NaN, hides what has
   no number. Its ends are rounded as the numbers are. */
function shows(coloring, i) {
  if (hasClasses(coloring)) return !coloring.hidden.has(classOf(i, coloring));
  const [low, high] = coloring.range.map(Math.fround);
  const number = coloring.values[i];
  return !Number.isNaN(number) && !(number < low) && !(number > high);
}

/* All filters together: the text, and what is hidden in each coloring. Where that changes nothing,
   lists stay on their pages. */
async function updateVisible() {
  const text = filterInput();
  let texts = searchTexts;
  if (text && !texts) {
    $("count").textContent = "Reading names …";
    const complete = await loaded(allRows());
    if (text !== filterInput()) return;
    texts = searchTexts ?? allRows().map(searchText);
    if (complete) searchTexts = texts;
  }
  const filtering = data.colorings.filter(({ hidden, range }) => hidden.size || range);
  const before = state.visible.slice();
  for (let i = 0; i < data.count; i++) {
    const matches = !text || texts[i].includes(text);
    state.visible[i] = matches && filtering.every((coloring) => shows(coloring, i));
  }
  const total = visibleRows().length;
  const all = count(data.count, "image");
  $("count").textContent = total === data.count ? all : `${total.toLocaleString("en")} of ${all}`;
  showFilters(filtering);
  if (before.some((each, i) => each !== state.visible[i])) turnToFirst();
  showLists();
  restyle();
}

/* Gives every image a class by its name, if it has one. The classes that come first keep their places,
   and so their colors; those that are hidden stay hidden as long as they have their names. */
function setClasses(coloring, first, nameOf) {
  const hidden = Array.from(coloring.hidden, (each) => coloring.classes[each]);
  const numbers = new Map([[undefined, -1]]);
  const numberOf = (name) => numbers.get(name) ?? numbers.set(name, numbers.size - 1).get(name);
  first.forEach(numberOf);
  coloring.values = Int32Array.from(data.number, (number, i) => numberOf(nameOf(number, i)));
  coloring.classes = [...numbers.keys()].slice(1);
  coloring.hidden = new Set(hidden.filter((name) => numbers.has(name)).map(numberOf));
  searchTexts = null;
}

/* A button for each coloring that hides something, which shows it again. */
function showFilters(filtering) {
  $("filters").replaceChildren(...filtering.map((coloring) => {
    const clear = () => { Object.assign(coloring, NO_FILTER()); showLegend(); updateVisible(); };
    return button(`${coloring.name}: ${filterText(coloring)} ✕`, clear, { title: "Show all again" });
  }));
}

function filterText({ hidden, range }) {
  if (!range) return `${hidden.size} hidden`;
  const [low, high] = range.map((end) => (Number.isNaN(end) ? "" : String(end)));
  return low && high ? `${low} to ${high}` : low ? `from ${low}` : `to ${high}`;
}

function setColoring(at) {
  state.coloring = at;
  state.highlighted = null;
  $("coloring").value = at;
  $("note").textContent = currentColoring()?.note ?? "";
  updateLook();
  showLegend();
  markTiles();
  restyle();
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
  const hide = (hidden) => () => {
    coloring.hidden = new Set(hidden);
    classes.forEach((each, at) => { entries[at].ariaPressed = !coloring.hidden.has(each); });
    updateVisible();
  };
  const entries = classes.map((each) => legendEntry(coloring, each, sizes.get(each)));
  const only = (each) => button("only", hide(classes.filter((other) => other !== each)),
    { className: "map-only", ariaLabel: `Show only ${className(coloring, each)}` });
  return [
    note("Click a class to hide or show it."),
    make("ul", {}, ...classes.map((each, at) => make("li", {}, entries[at], only(each)))),
    buttons(...(classes.length > 2
      ? [button("Show all", hide([])), button("Hide all", hide(classes))] : [])),
  ];
}

function legendEntry(coloring, each, size) {
  const label = make("bdi", {}, className(coloring, each));
  const content = [legendMark(each), label, make("span", {}, size.toLocaleString("en"))];
  const entry = button(content, () => {
    if (!coloring.hidden.delete(each)) coloring.hidden.add(each);
    entry.ariaPressed = !coloring.hidden.has(each);
    updateVisible();
  }, { className: "map-entry", ariaPressed: !coloring.hidden.has(each) });
  const highlight = (highlighted) => () => { state.highlighted = highlighted; restyle(); };
  entry.onpointerenter = entry.onfocus = highlight(each);
  entry.onpointerleave = entry.onblur = highlight(null);
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
  const texts = range(coloring).map((end) => end.toFixed(2));
  const ends = make("div", { className: "ends" }, ...texts.map((end) => make("span", {}, end)));
  const unknown = coloring.values.some(Number.isNaN) ? [note(legendMark(-1), " unknown")] : [];
  return [scale, ends, rangeFields(coloring, texts), ...unknown];
}

/* Two numbers between which images are shown; an empty one is no limit. */
function rangeFields(coloring, placeholders) {
  const ends = coloring.range ?? [NaN, NaN];
  const fields = ["Show from", "to"].map((label, at) => make("input", {
    type: "number", step: "any", placeholder: placeholders[at], ariaLabel: `${label}, ${coloring.name}`,
    value: Number.isNaN(ends[at]) ? "" : ends[at],
    oninput: () => {
      const range = fields.map((field) => field.valueAsNumber);
      coloring.range = range.every(Number.isNaN) ? null : range;
      updateVisible();
    },
  }));
  return buttons("Show from", fields[0], "to", fields[1]);
}
