/* The panel of one image: its values, its nearest neighbors, its class. */

/* An image with a caption below, which a click opens. */
function galleryItem(i, label, caption) {
  const content = [tile(i), ...(caption ? [make("span", {}, caption)] : [])];
  return button(content, () => open(i), { title: label, ariaLabel: label });
}

const tiles = (items) => make("ul", { className: "map-tiles" },
  ...items.map((item) => make("li", {}, ...[item].flat())));

const gallery = (members) => tiles(members.map((i) => galleryItem(i, name(i))));

function fillPanel(title, ...content) {
  $("panel").replaceChildren(
    make("h3", { tabIndex: -1 }, title),
    button("Close", close, { className: "map-close" }),
    ...content,
  );
}

async function showPanel() {
  const i = state.open;
  if (i < 0) {
    $("panel").replaceChildren(note("Click a point to see its image and its nearest neighbors."));
    return;
  }
  if (await loaded([i])) await loaded(neighbors(i));
  if (state.open !== i) return; // another one meanwhile
  if (!detailsOf(i)) {
    close();
    return;
  }
  fillPanel(
    make("bdi", {}, name(i)),
    served
      ? make("div", { className: "map-large" }, imageLink(`image/${data.number[i]}`, name(i)), values(i))
      : make("div", { className: "map-about" }, tile(i), values(i)),
    ...wholeImage(i),
    ...nearestNeighbors(i),
    make("div", { id: "map-same-class" }),
  );
  await updatePanel();
}

/* Shows what depends on the classes. The rest stays, with the focus and what was compared. */
async function updatePanel() {
  const [i, classes] = [state.open, runClasses];
  if (i < 0) return;
  const same = await sameClass(i);
  const shown = $("values");
  if (runClasses !== classes || state.open !== i || Number(shown?.dataset.image) !== i) return;
  shown.replaceWith(values(i));
  $("same-class").replaceChildren(...same);
}

function imageLink(href, alt) {
  const image = make("img", { src: href, alt });
  return make("a", { href, target: "_blank", title: "Open in a new tab" }, image);
}

/* Of a region, where it is cut from. */
function wholeImage(i) {
  if (!data.regions.includes(i)) return [];
  const shown = served
    ? make("div", { className: "map-large" }, imageLink(`whole/${data.number[i]}`, "The region in its image"))
    : note("nearkin explore RUN shows the region in its image.");
  return [make("h4", {}, "In its image"), shown];
}

function values(i) {
  const pairs = data.colorings.map((coloring) => [coloring.name, value(coloring, i)]);
  pairs.push(["Number", String(data.number[i])]);
  const cells = ([key, text]) => [make("dt", {}, key), make("dd", {}, text)];
  const list = make("dl", { id: "map-values" }, ...pairs.flatMap(cells));
  list.dataset.image = i;
  return list;
}

function nearestNeighbors(i) {
  if (!data.k) return [];
  const among = data.among ? ` Among the ${count(data.among, "image")} that place all others.` : "";
  const where = served
    ? "Click a number to see where the two images are alike."
    : "nearkin explore RUN shows where two images are alike.";
  const near = Array.from(neighbors(i), (other, j) => neighborItem(i, other, similarity(i, j).toFixed(2)));
  return [
    make("h4", {}, "Nearest neighbors"),
    note(`By cosine similarity of the embeddings; 1 is identical.${among} ${where}`),
    tiles(near),
    make("div", { id: "map-likeness", role: "status" }),
  ];
}

/* A neighbor, whose number leads to where the two are alike if there is a server. */
function neighborItem(i, other, cosine) {
  const title = `${name(other)}, ${cosine}`;
  if (!served) return galleryItem(other, title, cosine);
  const onclick = ({ target }) => showLikeness(i, other, target);
  const ariaLabel = `${cosine}, where ${name(other)} is alike`;
  const where = button(cosine, onclick, { className: "map-where", ariaPressed: false, ariaLabel });
  return [galleryItem(other, title), where];
}

/* Other images of its class: highest score first if there are scores, else nearest on the map. */
async function sameClass(i) {
  const coloring = data.colorings.find(hasClasses);
  const own = coloring ? classOf(i, coloring) : -1;
  if (own < 0) return [];
  const scores = withRole("score");
  const distance = (j) => Math.hypot(
    data.xy[2 * i] - data.xy[2 * j], data.xy[2 * i + 1] - data.xy[2 * j + 1]);
  const rank = scores ? (j) => -(scores.values[j] || 0) : distance;
  const members = allRows().filter((j) => j !== i && coloring.values[j] === own);
  if (!members.length) return [];
  const shown = members.sort((a, b) => rank(a) - rank(b)).slice(0, GALLERY);
  const title = `More of ${className(coloring, own)}`; // before classes may change
  await loaded(shown);
  const all = count(members.length + 1, "image");
  return [
    make("h4", {}, title),
    note(`${coloring.name}; ${scores ? "highest score first" : "nearest on the map first"}.`),
    gallery(shown),
    buttons(button(`All ${all} in the grid`, () => listClass(coloring, own))),
  ];
}

/* By its name: edits of classes change their numbers. */
function listClass(coloring, each) {
  const own = coloring.classes[each];
  const members = () => allRows().filter((i) => coloring.classes[coloring.values[i]] === own);
  return list(className(coloring, each), members);
}

function describe(i) {
  const coloring = currentColoring();
  return coloring ? `${name(i)}, ${coloring.name}: ${value(coloring, i)}` : name(i);
}

/* Not in a frame of a notebook, whose page has no address of its own. */
function setAddress(address) {
  if (location.protocol !== "about:") history.replaceState(null, "", address);
}

async function open(i, { focus = true } = {}) {
  state.open = state.cursor = i;
  hideTip();
  setAddress(`#image=${data.number[i]}`);
  await showPanel();
  if (state.open !== i) return;
  announce(`Opened ${describe(i)}. ${count(data.k, "nearest neighbor")} in the panel.`);
  if (focus) $("panel").querySelector("h3").focus();
  // The panel may be below the map, or below a long legend.
  const [side, panel] = [$("side"), $("panel")];
  const below = panel.getBoundingClientRect().top - side.getBoundingClientRect().top;
  if (narrow.matches) panel.scrollIntoView({ block: "nearest" });
  else if (below > side.clientHeight / 2) side.scrollTop += below;
  bringIntoView(i);
}

function close() {
  state.open = -1;
  state.query = null;
  showPanel();
  setAddress(location.pathname + location.search);
  announce("Closed.");
  const view = grid.on ? grid.tiles.get(state.cursor) : canvas;
  view?.focus();
  redraw();
}

/* What an address on the page leads to, if it is an image of the map or a class. */
function destination(hash) {
  const address = new URLSearchParams(hash.slice(1));
  if (address.has("image")) {
    const i = data.number.indexOf(Number(address.get("image")));
    return i < 0 ? null : () => { setGrid(false); open(i); };
  }
  const coloring = withRole("class") ?? data.colorings.find(hasClasses);
  const each = coloring ? classAt(coloring, address.get("class")) : -1;
  return each < 0 ? null : () => listClass(coloring, each);
}

/* Links on the page call classes as they were named when it was made: their images lead to what they
   are now. */
function classAt(coloring, text) {
  for (const of of [coloring, coloring.first ?? coloring]) {
    const each = of.classes.findIndex((_, at) => className(of, at) === text);
    const i = of.values.indexOf(each);
    if (each >= 0 && i >= 0) return classOf(i, coloring);
  }
  return -1;
}

function follow(hash) {
  const go = destination(hash);
  if (!go) return;
  $("explorer").scrollIntoView({ block: "start" });
  go();
}

/* Links within the page. In a frame of a notebook, their addresses are those of the notebook; and
   what is folded has to be opened. */
function followLink(event) {
  const link = event.target.closest?.("a[href^='#']");
  if (!link) return;
  const hash = link.getAttribute("href");
  const target = document.getElementById(hash.slice(1));
  if (target?.matches("details")) target.open = true;
  if (!destination(hash) && location.protocol !== "about:") return;
  event.preventDefault();
  target?.scrollIntoView();
  follow(hash);
}
