/* One image: what is known of it, what is like it, its class. */

/* A row of images, each a button that opens it. */
function gallery(members, caption = () => "") {
  const items = members.map((i) => {
    const label = [name(i), caption(i)].filter(Boolean).join(", ");
    const made = button(tile(i), () => open(i), { title: label, "aria-label": label });
    if (caption(i)) made.append(make("span", {}, caption(i)));
    return make("li", {}, made);
  });
  return make("ul", { className: "map-tiles" }, ...items);
}

function showPanel() {
  const panel = $("panel");
  panel.replaceChildren();
  if (state.open < 0) {
    const hint = "Click a point: its image and those most like it appear here.";
    panel.append(make("p", { className: "note" }, hint));
    return;
  }
  const i = state.open;
  panel.append(
    make("h3", { tabIndex: -1 }, make("bdi", {}, name(i))),
    button("Close", close, { className: "map-close" }),
    make("div", { className: served ? "map-large" : "map-about" }, large(i), facts(i)),
    ...similar(i),
    ...sameClass(i),
  );
}

function large(i) {
  if (!served) return tile(i);
  const address = `/image/${data.number[i]}`;
  const shown = make("img", { src: address, alt: name(i) });
  return make("a", { href: address, target: "_blank", title: "Open it by itself" }, shown);
}

function facts(i) {
  const made = make("dl");
  for (const coloring of data.colorings) {
    made.append(make("dt", {}, coloring.name), make("dd", {}, value(coloring, i)));
  }
  made.append(make("dt", {}, "Number"), make("dd", {}, String(data.number[i])));
  return made;
}

function similar(i) {
  if (!data.k) return [];
  const near = new Map(Array.from(neighbors(i), (other, j) => [other, similarity(i, j)]));
  const caption = (other) => near.get(other).toFixed(2);
  return [
    make("h4", {}, "Most like it"),
    make("p", { className: "note" }, "To the encoder. The number is the similarity: 1 is the same."),
    gallery([...near.keys()], caption),
  ];
}

/* The most typical of its class first, as far as that is known, else those that lie nearest. */
function sameClass(i) {
  const coloring = data.colorings.find(byClass);
  const of = coloring ? classOf(i, coloring) : -1;
  if (of < 0) return [];
  const scores = data.colorings.find((each) => each.name === "Score" && !byClass(each));
  const far = (j) => Math.hypot(
    data.xy[2 * i] - data.xy[2 * j], data.xy[2 * i + 1] - data.xy[2 * j + 1]);
  const rank = scores ? (j) => -(scores.values[j] || 0) : far;
  const members = Array.from(data.names.keys()).filter((j) => j !== i && coloring.values[j] === of);
  members.sort((a, b) => rank(a) - rank(b));
  if (!members.length) return [];
  const first = scores ? "surest first" : "nearest on the map first";
  const some = members.length > GALLERY ? `${GALLERY} of ${members.length}, ` : "";
  return [
    make("h4", {}, `More of ${value(coloring, i)}`),
    make("p", { className: "note" }, `${coloring.name}; ${some}${first}.`),
    gallery(members.slice(0, GALLERY)),
  ];
}

function describe(i) {
  const coloring = current();
  return coloring ? `${name(i)}, ${coloring.name}: ${value(coloring, i)}` : name(i);
}

function open(i, { focus = true } = {}) {
  state.open = state.cursor = i;
  showPanel();
  hideTip();
  history.replaceState(null, "", `#image=${data.number[i]}`);
  say(`Opened ${describe(i)}. ${count(data.k, "similar image")} in the panel.`);
  if (focus) $("panel").querySelector("h3").focus();
  reveal();
  bringIntoView(i);
}

/* The panel may lie below the map, or below a long list. */
function reveal() {
  const [side, panel] = [$("side"), $("panel")];
  const below = panel.getBoundingClientRect().top - side.getBoundingClientRect().top;
  if (narrow.matches) panel.scrollIntoView({ block: "nearest" });
  else if (below > side.clientHeight / 2) side.scrollTop += below;
}

function close() {
  state.open = -1;
  state.found = null;
  showPanel();
  history.replaceState(null, "", location.pathname + location.search);
  say("Closed.");
  canvas.focus();
  redraw();
}

function openFromAddress() {
  const asked = /^#image=(\d+)$/.exec(location.hash);
  const at = asked ? positions.get(Number(asked[1])) : undefined;
  if (at !== undefined) open(at);
}
