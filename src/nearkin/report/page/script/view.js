/* The visible part of the map. */

const box = { width: 0, height: 0, ratio: 1 };
const bounds = { low: [Infinity, Infinity], high: [-Infinity, -Infinity] };
data.xy.forEach((value, at) => {
  bounds.low[at % 2] = Math.min(bounds.low[at % 2], value);
  bounds.high[at % 2] = Math.max(bounds.high[at % 2], value);
});

/* The view of the whole map. */
function wholeMap() {
  const { low, high } = bounds;
  const scales = [
    (box.width - 2 * PADDING) / (high[0] - low[0]),
    (box.height - 2 * PADDING) / (high[1] - low[1]),
  ].filter(Number.isFinite);
  const scale = Math.max(1e-9, Math.min(...scales, 1e9));
  return { x: (low[0] + high[0]) / 2, y: (low[1] + high[1]) / 2, scale };
}

const zoomLevel = () => state.view.scale / wholeMap().scale;

/* y grows upwards, as in every plot. */
function toScreen(x, y) {
  const { view } = state;
  return [
    box.width / 2 - view.x * view.scale + x * view.scale,
    box.height / 2 + view.y * view.scale - y * view.scale,
  ];
}

function toMap(x, y) {
  const { view } = state;
  return [
    view.x + (x - box.width / 2) / view.scale,
    view.y - (y - box.height / 2) / view.scale,
  ];
}

const screenPoint = (i) => toScreen(data.xy[2 * i], data.xy[2 * i + 1]);

function inside(x, y, margin = 0) {
  return x >= margin && y >= margin && x < box.width - margin && y < box.height - margin;
}

/* Zooms so that the point under (x, y) stays there. */
function zoom(factor, x = box.width / 2, y = box.height / 2) {
  const [before, { scale }] = [toMap(x, y), wholeMap()];
  state.animation = null;
  state.view.scale = Math.min(1000 * scale, Math.max(0.8 * scale, state.view.scale * factor));
  const after = toMap(x, y);
  state.view.x += before[0] - after[0];
  state.view.y += before[1] - after[1];
  redraw();
}

/* Moves the view so that the eye can follow, unless the reader prefers no motion. */
function animateTo(target) {
  const [from, start, animation] = [{ ...state.view }, performance.now(), {}];
  state.animation = animation;
  const step = (now) => {
    if (state.animation !== animation) return; // the reader has moved the map meanwhile
    const share = reducedMotion.matches ? 1 : Math.min(1, Math.max(0, (now - start) / 250));
    const eased = share * (2 - share);
    for (const key of ["x", "y", "scale"]) {
      state.view[key] = from[key] + (target[key] - from[key]) * eased;
    }
    draw();
    if (share < 1) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

/* Shows as much of the map as the window has room for. */
function setFull(on) {
  $("explorer").classList.toggle("full", on);
  $("full").ariaPressed = on;
}

const isFull = () => $("explorer").classList.contains("full");

function bringIntoView(i) {
  if (inside(...screenPoint(i), PADDING / 2)) redraw();
  else animateTo({ ...state.view, x: data.xy[2 * i], y: data.xy[2 * i + 1] });
}

function resize() {
  const wasWhole = !box.width || Math.abs(zoomLevel() - 1) < 1e-6;
  const ratio = Math.min(2, devicePixelRatio || 1);
  const { width, height } = canvas.getBoundingClientRect();
  Object.assign(box, { width, height, ratio });
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  frame = null;
  if (wasWhole) state.view = wholeMap();
  redraw();
}
