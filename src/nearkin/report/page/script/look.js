/* How images look: as points by a coloring, and as thumbnails. */

const byClass = (coloring) => coloring.classes.length > 0;
const current = () => data.colorings[state.coloring];

function value(coloring, i) {
  const of = coloring.values[i];
  if (byClass(coloring)) return of < 0 ? "unknown" : visible(coloring.classes[of]);
  return Number.isNaN(of) ? "unknown" : of.toFixed(3);
}

/* The class of an image as the legend has it, where the coloring has classes. */
function classOf(i, coloring = current()) {
  return coloring && byClass(coloring) ? Math.max(-1, coloring.values[i]) : -1;
}

function range(coloring) {
  let [low, high] = [Infinity, -Infinity];
  for (const each of coloring.values) {
    if (each < low) low = each;
    if (each > high) high = each;
  }
  return low <= high ? [low, high] : [0, 0];
}

/* Even steps of lightness: a scale that survives any kind of color blindness, and print. */
function scale() {
  const strip = make("canvas", { width: STEPS, height: 1 });
  const brush = strip.getContext("2d", { willReadFrequently: true });
  const [from, to] = dark.matches ? [0.42, 0.93] : [0.88, 0.3];
  for (let x = 0; x < STEPS; x++) {
    const share = x / (STEPS - 1);
    const hue = dark.matches ? 300 - 200 * share : 110 + 190 * share;
    brush.fillStyle = `oklch(${from + (to - from) * share} 0.12 ${hue})`;
    brush.fillRect(x, 0, 1, 1);
  }
  return strip;
}

/* Colors as they lie in memory: opaque, and blue before red. */
function tones(css) {
  const strip = make("canvas", { width: css.length, height: 1 });
  const brush = strip.getContext("2d", { willReadFrequently: true });
  css.forEach((color, x) => { brush.fillStyle = color; brush.fillRect(x, 0, 1, 1); });
  return pixels(strip);
}

function pixels(strip) {
  const held = strip.getContext("2d").getImageData(0, 0, strip.width, strip.height);
  return new Uint32Array(held.data.buffer);
}

const theme = { css: [], tones: null, scale: null, steps: null };

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  theme.css = Array.from({ length: COLORS }, (_, at) => read(`class${at}`));
  theme.paper = read("card");
  theme.ink = read("ink");
  theme.quiet = read("quiet");
  theme.accent = read("accent");
  theme.tones = tones([...theme.css, theme.paper, theme.quiet]);
  theme.scale = scale();
  theme.steps = pixels(theme.scale);
}

/* How every image looks as a point; worked out once per coloring, not once per frame. */
const look = { tone: new Uint32Array(data.count), shape: new Uint8Array(data.count) };

function dress() {
  const coloring = current();
  const [low, high] = coloring && !byClass(coloring) ? range(coloring) : [0, 0];
  for (let i = 0; i < data.count; i++) {
    const of = coloring ? coloring.values[i] : 0;
    const unknown = Number.isNaN(of) || (of < 0 && byClass(coloring));
    const classes = !coloring || byClass(coloring);
    look.shape[i] = classes && !unknown ? of % SHAPES.length : 0;
    if (unknown) look.tone[i] = theme.tones[COLORS + 1];
    else if (classes) look.tone[i] = theme.tones[of % COLORS];
    else look.tone[i] = theme.steps[high > low ? Math.round((STEPS - 1) * (of - low) / (high - low)) : 0];
  }
}

function cssOf(i) {
  const [r, g, b] = new Uint8Array(look.tone.buffer, 4 * i, 3);
  return `rgb(${r} ${g} ${b})`;
}

/* Sheets are decoded when the first of their images is wanted: all of them would be 200 MB. */
const sheets = data.sheets.map(() => ({ bitmap: null, asked: null }));

function sheet(at) {
  const held = sheets[at];
  held.asked ??= createImageBitmap(new Blob([bytes(data.sheets[at])])).then((bitmap) => {
    held.bitmap = bitmap;
    data.sheets[at] = "";
    redraw();
  });
  return held;
}

function paste(brush, i, x, y, side) {
  const at = Math.floor(i / data.perSheet);
  const { bitmap } = sheet(at);
  if (!bitmap) return false;
  const place = i % data.perSheet;
  const left = (place % data.columns) * data.side;
  const top = Math.floor(place / data.columns) * data.side;
  brush.drawImage(bitmap, left, top, data.side, data.side, x, y, side, side);
  return true;
}

function tile(i) {
  const made = make("canvas", { width: data.side, height: data.side, className: "tile" });
  const draw = () => paste(made.getContext("2d"), i, 0, 0, data.side);
  if (!draw()) sheet(Math.floor(i / data.perSheet)).asked.then(draw);
  return made;
}
