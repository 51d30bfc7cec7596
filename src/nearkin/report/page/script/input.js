/* Mouse, touch and keyboard; then the start. */

/* The image at a point of the screen. */
function imageAt(x, y) {
  for (const [i, [left, top, side]] of drawnImages) {
    if (Math.abs(left - x) <= side / 2 + 2 && Math.abs(top - y) <= side / 2 + 2) return i;
  }
  return closest((px, py) => (px - x) ** 2 + (py - y) ** 2, CLICK_DISTANCE ** 2);
}

/* The visible image with the smallest cost of its screen coordinates; -1 if none is below the limit. */
function closest(cost, limit = Infinity) {
  const { scale } = state.view;
  const [left, top] = toScreen(0, 0);
  let [best, least] = [-1, limit];
  for (let i = 0; i < data.count; i++) {
    if (!state.visible[i]) continue;
    const own = cost(left + data.xy[2 * i] * scale, top - data.xy[2 * i + 1] * scale);
    if (own < least) [best, least] = [i, own];
  }
  return best;
}

function showTip(i) {
  const tip = $("tip");
  const [x, y] = screenPoint(i);
  tip.hidden = !inside(x, y);
  if (tip.hidden) return;
  const label = make("bdi", {}, name(i));
  if (!detailsOf(i)) loaded([i]).then(() => { label.textContent = name(i); });
  tip.replaceChildren(tile(i), label);
  const coloring = currentColoring();
  if (coloring) tip.append(make("span", {}, value(coloring, i)));
  const { offsetWidth: width, offsetHeight: height } = tip;
  const beside = x + 14 + width < box.width ? x + 14 : x - 14 - width;
  tip.style.left = `${Math.max(0, beside)}px`;
  tip.style.top = `${Math.min(Math.max(0, y - height / 2), box.height - height)}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

const touches = new Map();
let pressed = null; // where the last press began, and whether it has moved since

const canvasPoint = (event) => [event.offsetX, event.offsetY];

function press(event) {
  if (event.button) return;
  const at = canvasPoint(event);
  canvas.setPointerCapture(event.pointerId);
  touches.set(event.pointerId, at);
  pressed = { at, moved: false, mode: selectionMode(event) };
  state.animation = null;
  if (pressed.mode !== "replace" || state.lassoMode) state.lasso = [toMap(...at)];
  hideTip();
}

function move(event) {
  const to = canvasPoint(event);
  const from = touches.get(event.pointerId);
  if (!from) return hover(to);
  touches.set(event.pointerId, to);
  if (touches.size === 2) return pinch(event.pointerId, from, to);
  if (Math.hypot(to[0] - pressed.at[0], to[1] - pressed.at[1]) > 4) pressed.moved = true;
  if (state.lasso) state.lasso.push(toMap(...to));
  else if (pressed.moved && !scrolls(event)) {
    state.view.x -= (to[0] - from[0]) / state.view.scale;
    state.view.y += (to[1] - from[1]) / state.view.scale;
  }
  return redraw();
}

function hover(at) {
  const i = imageAt(...at);
  canvas.classList.toggle("over", i >= 0);
  if (i >= 0) showTip(i);
  else hideTip();
}

function pinch(id, from, to) {
  state.lasso = null;
  pressed.moved = true;
  const [[, other]] = [...touches].filter(([touch]) => touch !== id);
  const distance = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
  state.view.x -= (to[0] - from[0]) / 2 / state.view.scale;
  state.view.y += (to[1] - from[1]) / 2 / state.view.scale;
  if (distance(from) > 1) zoom(distance(to) / distance(from), ...other);
}

/* One finger scrolls the page, unless the map is all that there is to see; two move the map. */
const scrolls = ({ pointerType }) => pointerType === "touch" && !isFull();

function keepFingers(event) {
  const meant = event.touches.length > 1 || state.lassoMode || isFull();
  if (meant && event.cancelable) event.preventDefault(); // not while the page scrolls
}

function release(event) {
  if (!touches.delete(event.pointerId)) return;
  if (state.lasso && pressed.moved) return endLasso(pressed.mode);
  state.lasso = null;
  if (pressed.moved || event.type !== "pointerup") return undefined;
  const i = imageAt(...canvasPoint(event));
  if (i < 0) return undefined;
  return pressed.mode === "replace" ? open(i, { focus: false }) : select([i], pressed.mode);
}

let hintTimer = 0;

/* The wheel scrolls the page, unless it is clear that the map is meant: nobody is caught in it. */
function wheel(event) {
  if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas && !isFull()) {
    $("hint").hidden = false;
    clearTimeout(hintTimer);
    hintTimer = setTimeout(() => { $("hint").hidden = true; }, 1500);
    return;
  }
  event.preventDefault();
  hideTip();
  zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 400), ...canvasPoint(event));
}

/* The closest image in a direction; distance across it counts more than along it. */
function nextImage(from, [ux, uy]) {
  const [x, y] = screenPoint(from);
  return closest((px, py) => {
    const along = (px - x) * ux + (py - y) * uy;
    const across = Math.abs((px - x) * uy) + Math.abs((py - y) * ux);
    return along > 0 && across <= 2 * along ? along + 2 * across : Infinity;
  });
}

async function step(direction) {
  const fromCursor = state.cursor >= 0 && state.visible[state.cursor];
  const to = fromCursor
    ? nextImage(state.cursor, direction)
    : closest((x, y) => Math.hypot(x - box.width / 2, y - box.height / 2));
  if (to < 0) return announce("No image in that direction.");
  state.cursor = to;
  bringIntoView(to);
  showTip(to);
  await loaded([to]);
  return announce(describe(to));
}

function escape() {
  if (state.lasso || state.lassoMode) setLassoMode(false);
  else if (state.open >= 0) close();
  else if (isFull()) setFull(false);
  else {
    state.cursor = -1;
    hideTip();
    redraw();
  }
}

const KEYS = {
  "ArrowLeft": () => step([-1, 0]),
  "ArrowRight": () => step([1, 0]),
  "ArrowUp": () => step([0, -1]),
  "ArrowDown": () => step([0, 1]),
  "Enter": () => state.cursor >= 0 && open(state.cursor),
  " ": () => state.cursor >= 0 && toggleSelected(state.cursor),
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  "Home": () => animateTo(wholeMap()),
  "Escape": escape,
};

/* Does what a key is for, in the map or in the grid; all arguments are those of its action. */
function pressKey(event, keys, ...all) {
  const act = keys[event.key] ?? labelKey(event.key);
  if (event.ctrlKey || event.metaKey || event.altKey || !act) return;
  act(...all);
  event.preventDefault();
}

function listen() {
  $("coloring").onchange = (event) => setColoring(Number(event.target.value));
  $("filter").oninput = updateVisible;
  $("in").onclick = KEYS["+"];
  $("out").onclick = KEYS["-"];
  $("fit").onclick = KEYS["Home"];
  $("lasso").onclick = () => setLassoMode(!state.lassoMode);
  $("shown").onclick = (event) => {
    select(visibleRows().filter((i) => inside(...screenPoint(i))), selectionMode(event));
  };
  $("full").onclick = () => setFull(!isFull());
  $("show-grid").onclick = () => setGrid(!grid.on);
  $("table").ontoggle = showTable;
  $("panel").onkeydown = (event) => { if (event.key === "Escape") close(); };
  Object.assign(canvas, {
    onpointerdown: press, onpointermove: move, onpointerup: release, onpointercancel: release,
    onpointerleave: hideTip, onblur: hideTip, onwheel: wheel,
    onkeydown: (event) => pressKey(event, KEYS),
  });
  for (const kind of ["touchstart", "touchmove"]) {
    canvas.addEventListener(kind, keepFingers, { passive: false });
  }
  document.addEventListener("click", followLink);
  window.onhashchange = () => follow(location.hash);
  dark.onchange = () => { readTheme(); showLegend(); redraw(); };
  new ResizeObserver(resize).observe(canvas);
}

findLabeled();
readTheme();
showPanel();
resize();
setColoring(0);
updateVisible();
listen();
follow(location.hash);
if (served) connect();
