/* Which images are shown, and what their colors mean. */

let words = null; // what the filter looks in, made when it is first used

function said(i) {
  const classes = data.colorings.filter(byClass).map((coloring) => value(coloring, i));
  return [data.names[i], ...classes].join("\n").toLowerCase();
}

function choose() {
  const wanted = state.wanted.trim().toLowerCase();
  if (wanted) words ??= data.names.map((_, i) => said(i));
  let left = 0;
  for (let i = 0; i < data.count; i++) {
    state.shown[i] = !state.hidden.has(classOf(i)) && (!wanted || words[i].includes(wanted));
    left += state.shown[i];
  }
  $("count").textContent = left === data.count
    ? count(left, "image")
    : `${left.toLocaleString("en")} of ${count(data.count, "image")}`;
  state.page = 0;
  showTable();
  redraw();
}

const allShown = () => Array.from(data.names.keys()).filter((i) => state.shown[i]);

function recolor(at) {
  state.coloring = at;
  state.hidden.clear();
  state.marked = null;
  $("note").textContent = current()?.note ?? "";
  dress();
  showLegend();
  choose();
}

function showLegend() {
  const coloring = current();
  $("legend").replaceChildren();
  if (!coloring) return;
  $("legend").append(make("h3", {}, coloring.name));
  if (byClass(coloring)) $("legend").append(...classLegend(coloring));
  else $("legend").append(...numberLegend(coloring));
}

function classLegend(coloring) {
  const sizes = new Map();
  for (let i = 0; i < data.count; i++) sizes.set(classOf(i), (sizes.get(classOf(i)) ?? 0) + 1);
  const classes = [...coloring.classes.keys(), -1].filter((each) => sizes.has(each));
  const entries = classes.map((each) => make("li", {}, entry(coloring, each, sizes.get(each))));
  const set = (hidden) => {
    state.hidden = new Set(hidden);
    for (const each of $("legend").querySelectorAll("li button")) {
      each.setAttribute("aria-pressed", String(!hidden.length));
    }
    choose();
  };
  const all = [button("Show all", () => set([])), button("Hide all", () => set(classes))];
  return [
    make("p", { className: "note" }, "Click a class to hide or show it."),
    make("ul", {}, ...entries),
    make("div", { className: "map-buttons" }, ...(classes.length > 2 ? all : [])),
  ];
}

function entry(coloring, each, size) {
  const called = each < 0 ? "unknown" : visible(coloring.classes[each]);
  const made = button("", () => {
    if (!state.hidden.delete(each)) state.hidden.add(each);
    made.setAttribute("aria-pressed", String(!state.hidden.has(each)));
    choose();
  }, { "aria-pressed": String(!state.hidden.has(each)) });
  const mark = (marked) => () => { state.marked = marked; redraw(); };
  for (const on of ["pointerenter", "focus"]) made.addEventListener(on, mark(each));
  for (const on of ["pointerleave", "blur"]) made.addEventListener(on, mark(null));
  made.append(sample(each), make("bdi", {}, called), make("span", {}, size.toLocaleString("en")));
  return made;
}

function sample(each) {
  const made = make("canvas", { width: 32, height: 32, className: "sample" });
  const brush = made.getContext("2d");
  brush.fillStyle = each < 0 ? theme.quiet : theme.css[each % COLORS];
  trace(brush, each < 0 ? 0 : each % SHAPES.length, 16, 16, 10);
  brush.fill();
  return made;
}

function numberLegend(coloring) {
  const [low, high] = range(coloring);
  const strip = make("canvas", { width: STEPS, height: 1, className: "scale" });
  strip.getContext("2d").drawImage(theme.scale, 0, 0);
  const ends = make("div", { className: "ends" });
  ends.append(make("span", {}, low.toFixed(2)), make("span", {}, high.toFixed(2)));
  const unknown = coloring.values.some(Number.isNaN);
  const rest = unknown ? [make("p", { className: "note" }, sample(-1), " unknown")] : [];
  return [strip, ends, ...rest];
}
