/* Mouse, fingers and keys. */

function at(x, y) {
  const held = images.find(([, px, py, side]) => {
    return Math.abs(px - x) <= side / 2 + 2 && Math.abs(py - y) <= side / 2 + 2;
  });
  if (held) return held[0];
  let [best, nearest] = [-1, NEAR];
  for (let i = 0; i < data.count; i++) {
    if (!state.shown[i]) continue;
    const [px, py] = spot(i);
    const far = Math.hypot(px - x, py - y);
    if (far < nearest) [best, nearest] = [i, far];
  }
  return best;
}

function showTip(i) {
  const tip = $("tip");
  const [x, y] = spot(i);
  if (!inside(x, y)) return hideTip();
  tip.replaceChildren(tile(i), make("bdi", {}, name(i)));
  const coloring = current();
  if (coloring) tip.append(make("span", {}, value(coloring, i)));
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const beside = x + 14 + width < box.width ? x + 14 : x - 14 - width;
  tip.style.left = `${Math.max(0, beside)}px`;
  tip.style.top = `${Math.min(Math.max(0, y - height / 2), box.height - height)}px`;
  return undefined;
}

function hideTip() {
  $("tip").hidden = true;
}

const fingers = new Map();
let pressed = null; // where the last press began, and whether it has moved since

function local(event) {
  const { left, top } = canvas.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
}

function press(event) {
  if (event.button) return;
  canvas.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, local(event));
  pressed = { at: local(event), moved: false };
  state.motion = null;
  if (event.shiftKey || state.drawing) state.lasso = [onMap(...local(event))];
  hideTip();
}

function move(event) {
  const to = local(event);
  const from = fingers.get(event.pointerId);
  if (!from) return hover(to);
  fingers.set(event.pointerId, to);
  if (fingers.size === 2) return pinch(event.pointerId, from, to);
  if (Math.hypot(to[0] - pressed.at[0], to[1] - pressed.at[1]) > 4) pressed.moved = true;
  if (state.lasso) state.lasso.push(onMap(...to));
  else if (pressed.moved) {
    state.view.x -= (to[0] - from[0]) / state.view.scale;
    state.view.y += (to[1] - from[1]) / state.view.scale;
  }
  return redraw();
}

function hover([x, y]) {
  const i = at(x, y);
  canvas.classList.toggle("over", i >= 0);
  if (i >= 0) showTip(i);
  else hideTip();
}

function pinch(finger, from, to) {
  state.lasso = null;
  pressed.moved = true;
  const [[, other]] = [...fingers].filter(([id]) => id !== finger);
  const apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
  if (apart(from) > 1) zoom(apart(to) / apart(from), ...other);
}

function release(event) {
  if (!fingers.delete(event.pointerId)) return;
  if (state.lasso) endLasso();
  else if (!pressed.moved && event.type === "pointerup") {
    const i = at(...local(event));
    if (i >= 0) open(i, { focus: false });
  }
}

/* At its smallest the map lets the page scroll on, so that nobody is caught in it. */
function wheel(event) {
  if (event.deltaY > 0 && enlarged() <= 0.81) return;
  event.preventDefault();
  hideTip();
  zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 400), ...local(event));
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/* The nearest image in a direction: far to the side counts more than far ahead. */
function next(from, [ux, uy]) {
  const [x, y] = spot(from);
  let [best, least] = [-1, Infinity];
  for (let i = 0; i < data.count; i++) {
    if (!state.shown[i] || i === from) continue;
    const [px, py] = spot(i);
    const along = (px - x) * ux + (py - y) * uy;
    const across = Math.abs((px - x) * uy) + Math.abs((py - y) * ux);
    if (along > 0 && across <= 2 * along && along + 2 * across < least) {
      [best, least] = [i, along + 2 * across];
    }
  }
  return best;
}

function nearestToMiddle() {
  let [best, least] = [-1, Infinity];
  for (const i of allShown()) {
    const [x, y] = spot(i);
    const far = Math.hypot(x - box.width / 2, y - box.height / 2);
    if (far < least) [best, least] = [i, far];
  }
  return best;
}

function step(direction) {
  const known = state.cursor >= 0 && state.shown[state.cursor];
  const to = known ? next(state.cursor, direction) : nearestToMiddle();
  if (to < 0) return say("No image further that way.");
  state.cursor = to;
  bringIntoView(to);
  showTip(to);
  return say(describe(to));
}

function back() {
  if (state.lasso || state.drawing) drawing(false);
  else if (state.open >= 0) close();
  else {
    state.cursor = -1;
    hideTip();
    redraw();
  }
}

const ACTIONS = {
  "Enter": () => state.cursor >= 0 && open(state.cursor),
  " ": () => state.cursor >= 0 && toggle(state.cursor),
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  "0": () => glide(fitted()),
  "Escape": back,
};

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (ARROWS[event.key]) step(ARROWS[event.key]);
  else if (ACTIONS[event.key]) ACTIONS[event.key]();
  else return;
  event.preventDefault();
}
