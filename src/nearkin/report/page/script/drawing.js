/* A frame of the map: points by a coloring, thumbnails, marks. */

const theme = { classes: [], tones: null, scale: null, scaleTones: null };

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  theme.classes = Array.from({ length: COLORS }, (_, at) => read(`class${at}`));
  for (const name of ["card", "ink", "quiet", "accent"]) theme[name] = read(name);
  theme.tones = pixels(strip([...theme.classes, theme.card, theme.quiet]));
  // Even steps of lightness survive any kind of color blindness, and print.
  const [from, to] = dark.matches ? [0.42, 0.93] : [0.88, 0.3];
  theme.scale = strip(Array.from({ length: SCALE_STEPS }, (_, x) => {
    const share = x / (SCALE_STEPS - 1);
    const hue = dark.matches ? 300 - 200 * share : 110 + 190 * share;
    return `oklch(${from + (to - from) * share} 0.12 ${hue})`;
  }));
  theme.scaleTones = pixels(theme.scale);
}

/* A canvas with a pixel per CSS color. */
function strip(colors) {
  const element = make("canvas", { width: colors.length, height: 1 });
  const brush = element.getContext("2d", { willReadFrequently: true });
  colors.forEach((color, x) => { brush.fillStyle = color; brush.fillRect(x, 0, 1, 1); });
  return element;
}

/* Colors as they lie in memory: opaque, and blue before red. */
function pixels(element) {
  const image = element.getContext("2d").getImageData(0, 0, element.width, element.height);
  return new Uint32Array(image.data.buffer);
}

/* How every image looks as a point, computed once per coloring, not once per frame. */
const look = { tone: new Uint32Array(data.count), shape: new Uint8Array(data.count) };

function updateLook() {
  const coloring = currentColoring();
  const classes = !coloring || hasClasses(coloring);
  const [low, high] = classes ? [0, 0] : range(coloring);
  for (let i = 0; i < data.count; i++) {
    const value = coloring ? coloring.values[i] : 0;
    const unknown = Number.isNaN(value) || (value < 0 && classes);
    const share = high > low ? (value - low) / (high - low) : 0;
    look.shape[i] = classes && !unknown ? value % SHAPES.length : 0;
    if (unknown) look.tone[i] = theme.tones[COLORS + 1];
    else if (classes) look.tone[i] = theme.tones[value % COLORS];
    else look.tone[i] = theme.scaleTones[Math.round((SCALE_STEPS - 1) * share)];
  }
}

function range(coloring) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of coloring.values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}

function cssColor(i) {
  const [r, g, b] = new Uint8Array(look.tone.buffer, 4 * i, 3);
  return `rgb(${r} ${g} ${b})`;
}

/* ---- thumbnails ---- */

/* Sheets are decoded when one of their images is first drawn: all of them would take 200 MB. */
const sheets = data.sheets.map(() => ({ bitmap: null, loading: null }));

function sheetOf(i) {
  const at = Math.floor(i / data.perSheet);
  const sheet = sheets[at];
  sheet.loading ??= createImageBitmap(new Blob([decodeBase64(data.sheets[at])])).then((bitmap) => {
    sheet.bitmap = bitmap;
    data.sheets[at] = "";
    redraw();
  });
  return sheet;
}

function paste(brush, i, x, y, side) {
  const { bitmap } = sheetOf(i);
  if (!bitmap) return false;
  const at = i % data.perSheet;
  const left = (at % data.columns) * data.side;
  const top = Math.floor(at / data.columns) * data.side;
  brush.drawImage(bitmap, left, top, data.side, data.side, x, y, side, side);
  return true;
}

function tile(i) {
  const element = make("canvas", { width: data.side, height: data.side, className: "tile" });
  const draw = () => paste(element.getContext("2d"), i, 0, 0, data.side);
  if (!draw()) sheetOf(i).loading.then(draw);
  return element;
}

/* ---- points ---- */

/* Points are written straight into the pixels of a frame that is larger than the map on every
   side, so that none has to be clipped: 20,000 take a few milliseconds. */
let frame = null;
let redrawPending = false;
let drawnImages = []; // points drawn as images, for the pointer: [i, x, y, side]

function redraw() {
  if (redrawPending) return;
  redrawPending = true;
  requestAnimationFrame(() => { redrawPending = false; draw(); });
}

/* The more room there is per point, the larger it is. */
function radius() {
  const room = Math.sqrt((box.width * box.height) / data.count);
  const small = Math.min(5, Math.max(1.8, 0.15 * room));
  return Math.min(MAX_RADIUS, small * Math.max(1, zoomLevel()) ** 0.3);
}

function currentFrame() {
  if (!frame) {
    const margin = Math.ceil(1.3 * MAX_RADIUS * box.ratio) + 3;
    const width = canvas.width + 2 * margin;
    const image = new ImageData(width, canvas.height + 2 * margin);
    frame = { margin, width, image, masks: new Map(), pixels: new Uint32Array(image.data.buffer) };
  }
  const size = Math.round(4 * radius() * box.ratio) / 4;
  if (!frame.masks.has(size)) {
    frame.masks.set(size, SHAPES.map((_, shape) => mask(shape, size, frame.margin, frame.width)));
  }
  return { ...frame, masks: frame.masks.get(size) };
}

function trace(brush, shape, x, y, size) {
  const corners = SHAPES[shape];
  brush.beginPath();
  if (corners) for (const [dx, dy] of corners) brush.lineTo(x + dx * size, y + dy * size);
  else brush.arc(x, y, size, 0, 2 * Math.PI);
  brush.closePath();
}

/* How much of each pixel around a point its shape covers, and the thin halo around it. */
function mask(shape, size, margin, width) {
  const side = 2 * margin + 1;
  const coverage = (paint) => {
    const element = make("canvas", { width: side, height: side });
    const brush = element.getContext("2d", { willReadFrequently: true });
    brush.lineWidth = Math.min(2.5 * box.ratio, 0.6 * size);
    trace(brush, shape, margin + 0.5, margin + 0.5, size);
    paint(brush);
    return brush.getImageData(0, 0, side, side).data.filter((_, at) => at % 4 === 3);
  };
  const core = coverage((brush) => brush.fill());
  const halo = coverage((brush) => { brush.fill(); brush.stroke(); });
  const covered = Array.from(halo.keys()).filter((at) => halo[at]);
  return {
    offset: Int32Array.from(covered, (at) => {
      return (Math.floor(at / side) - margin) * width + (at % side) - margin;
    }),
    core: Uint8Array.from(covered, (at) => core[at]),
    halo: Uint8Array.from(covered, (at) => halo[at]),
  };
}

/* Blends two opaque colors, two channels at a time. */
function mix(under, over, share) {
  const rest = 256 - share;
  const redBlue = ((under & 0xff00ff) * rest + (over & 0xff00ff) * share) >>> 8;
  const green = ((under & 0xff00) * rest + (over & 0xff00) * share) >>> 8;
  return (0xff000000 | (redBlue & 0xff00ff) | (green & 0xff00)) >>> 0;
}

function stamp({ offset, core, halo }, target, at, tone, background) {
  for (let k = 0; k < offset.length; k++) {
    const to = at + offset[k];
    if (core[k] === 255) target[to] = tone;
    else target[to] = mix(mix(target[to], background, halo[k]), tone, core[k]);
  }
}

/* Shuffled by a prime step: in the order of the data, the last class would cover all others. */
const STEP = [7919, 7907, 7901].find((prime) => data.count % prime) ?? 1;
const drawOrder = Uint32Array.from({ length: data.count }, (_, at) => (at * STEP) % data.count);

/* While something is highlighted or selected, everything else is faint. */
function faint(i) {
  const { highlighted, selected } = state;
  return (highlighted !== null && classOf(i) !== highlighted)
    || (selected.size > 0 && !selected.has(i));
}

/* Draws all points, the faint ones first, and returns those in view. */
function drawPoints() {
  const { pixels, margin, width, masks, image } = currentFrame();
  const [background, unknown] = [theme.tones[COLORS], theme.tones[COLORS + 1]];
  const inView = [];
  pixels.fill(background);
  for (const faintOnes of [true, false]) {
    for (const i of drawOrder) {
      if (!state.visible[i] || (faint(i) || look.tone[i] === unknown) !== faintOnes) continue;
      const [x, y] = screenPoint(i);
      if (!inside(x, y, -1)) continue;
      const at = (Math.round(y * box.ratio) + margin) * width + Math.round(x * box.ratio) + margin;
      stamp(masks[look.shape[i]], pixels, at, faintOnes ? unknown : look.tone[i], background);
      inView.push(i);
    }
  }
  pen.putImageData(image, -margin, -margin);
  return inView;
}

function draw() {
  const inView = drawPoints();
  pen.setTransform(box.ratio, 0, 0, box.ratio, 0, 0);
  drawnImages = [];
  if (zoomLevel() >= IMAGE_ZOOM && inView.length <= MAX_IMAGES) drawImages(inView);
  if (state.open >= 0) drawNeighbors(state.open);
  if (state.cursor >= 0) drawRing(state.cursor, 3, theme.accent);
  if (state.query) drawCross(...toScreen(...state.query));
  if (state.lasso) drawLasso();
  pen.setTransform(1, 0, 0, 1, 0, 0);
}

/* Draws as many images as fit without overlap; the others remain points. */
function drawImages(inView) {
  const side = Math.min(72, 24 + 5 * zoomLevel());
  const taken = new Map(); // at most one image per cell of this size
  const cell = (x, y) => Math.floor(x / side) * 65536 + Math.floor(y / side);
  const free = (x, y) => [-side, 0, side].every((dx) => [-side, 0, side].every((dy) => {
    const other = taken.get(cell(x + dx, y + dy));
    return !other || Math.abs(other[0] - x) >= side || Math.abs(other[1] - y) >= side;
  }));
  inView.reverse(); // the points drawn last are on top, so they come first here
  for (const i of state.cursor >= 0 ? [state.cursor, ...inView] : inView) {
    const [x, y] = screenPoint(i);
    if (!free(x, y)) continue;
    taken.set(cell(x, y), [x, y]);
    drawImage(i, x, y, side - 6);
  }
}

function drawImage(i, x, y, side) {
  pen.fillStyle = faint(i) ? theme.quiet : cssColor(i);
  pen.fillRect(x - side / 2 - 2, y - side / 2 - 2, side + 4, side + 4);
  if (faint(i)) pen.globalAlpha = 0.4;
  pen.imageSmoothingEnabled = data.side >= 32;
  paste(pen, i, x - side / 2, y - side / 2, side);
  pen.globalAlpha = 1;
  drawnImages.push([i, x, y, side]);
}

function drawNeighbors(i) {
  pen.strokeStyle = theme.ink;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.55;
  for (const other of neighbors(i)) {
    pen.beginPath();
    pen.moveTo(...screenPoint(i));
    pen.lineTo(...screenPoint(other));
    pen.stroke();
  }
  pen.globalAlpha = 1;
  for (const other of neighbors(i)) drawRing(other, 1.5, theme.ink);
}

function drawRing(i, width, color) {
  const [x, y] = screenPoint(i);
  const image = drawnImages.find(([other]) => other === i);
  const side = image?.[3] + 4;
  pen.lineWidth = width;
  pen.strokeStyle = color;
  pen.beginPath();
  if (image) pen.rect(x - side / 2, y - side / 2, side, side);
  else pen.arc(x, y, radius() + 3 + width / 2, 0, 2 * Math.PI);
  pen.stroke();
}

function drawCross(x, y) {
  for (const [width, color] of [[6, theme.card], [3, theme.accent]]) {
    pen.lineWidth = width;
    pen.strokeStyle = color;
    pen.beginPath();
    for (const [dx, dy] of [[11, 0], [0, 11]]) {
      pen.moveTo(x - dx, y - dy);
      pen.lineTo(x + dx, y + dy);
    }
    pen.stroke();
  }
}

function drawLasso() {
  pen.beginPath();
  for (const point of state.lasso) pen.lineTo(...toScreen(...point));
  pen.closePath();
  pen.fillStyle = pen.strokeStyle = theme.accent;
  pen.globalAlpha = 0.12;
  pen.fill();
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.setLineDash([5, 4]);
  pen.stroke();
  pen.setLineDash([]);
}
