/* Which part of the map is seen. */

const box = { width: 0, height: 0, ratio: 1 };
const bounds = extent();

function extent() {
  const [low, high] = [[Infinity, Infinity], [-Infinity, -Infinity]];
  data.xy.forEach((at, position) => {
    low[position % 2] = Math.min(low[position % 2], at);
    high[position % 2] = Math.max(high[position % 2], at);
  });
  return data.count ? { low, high } : { low: [0, 0], high: [1, 1] };
}

function fitted() {
  const { low, high } = bounds;
  const scales = [
    (box.width - 2 * PADDING) / (high[0] - low[0]),
    (box.height - 2 * PADDING) / (high[1] - low[1]),
  ].filter(Number.isFinite);
  const scale = Math.max(1e-9, Math.min(...scales, 1e9));
  return { x: (low[0] + high[0]) / 2, y: (low[1] + high[1]) / 2, scale };
}

const enlarged = () => state.view.scale / fitted().scale;

/* y grows upwards, as in every plot. */
function onScreen(x, y) {
  const { view } = state;
  return [
    box.width / 2 + (x - view.x) * view.scale,
    box.height / 2 - (y - view.y) * view.scale,
  ];
}

function onMap(x, y) {
  const { view } = state;
  return [
    view.x + (x - box.width / 2) / view.scale,
    view.y - (y - box.height / 2) / view.scale,
  ];
}

const spot = (i) => onScreen(data.xy[2 * i], data.xy[2 * i + 1]);

function inside(x, y, margin = 0) {
  return x >= margin && y >= margin && x < box.width - margin && y < box.height - margin;
}

function zoom(factor, x = box.width / 2, y = box.height / 2) {
  const [before, fit] = [onMap(x, y), fitted().scale];
  state.motion = null;
  state.view.scale = Math.min(1000 * fit, Math.max(0.8 * fit, state.view.scale * factor));
  const after = onMap(x, y);
  state.view.x += before[0] - after[0];
  state.view.y += before[1] - after[1];
  redraw();
}

/* Moves the map so that the eye can follow, unless the reader wants no motion. */
function glide(to) {
  const [from, start, motion] = [{ ...state.view }, performance.now(), {}];
  state.motion = motion;
  const step = (now) => {
    if (state.motion !== motion) return; // somebody has taken hold of the map
    const share = calm.matches ? 1 : Math.min(1, Math.max(0, (now - start) / 250));
    const eased = share * (2 - share);
    for (const key of ["x", "y", "scale"]) {
      state.view[key] = from[key] + (to[key] - from[key]) * eased;
    }
    draw();
    if (share < 1) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

function bringIntoView(i) {
  const [x, y] = spot(i);
  if (inside(x, y, PADDING / 2)) redraw();
  else glide({ ...state.view, x: data.xy[2 * i], y: data.xy[2 * i + 1] });
}

function resize() {
  const wasFitted = !box.width || Math.abs(enlarged() - 1) < 1e-6;
  const ratio = Math.min(2, devicePixelRatio || 1);
  const { width, height } = canvas.getBoundingClientRect();
  Object.assign(box, { width, height, ratio });
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  frame = null;
  if (wasFitted) state.view = fitted();
  redraw();
}
