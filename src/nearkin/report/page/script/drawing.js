/* A frame of the map: points by a coloring, thumbnails, marks. */

const theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of ["card", "ink", "quiet", "accent"]) theme[name] = read(name);
  theme.classes = Array.from({ length: COLORS }, (_, at) => read(`class${at}`));
  // Even steps of lightness survive any kind of color blindness, and print.
  const [from, to, hue, turn] = dark.matches ? [0.42, 0.93, 300, -200] : [0.88, 0.3, 110, 190];
  theme.scale = Array.from({ length: SCALE_STEPS }, (_, at) => {
    const share = at / (SCALE_STEPS - 1);
    return `oklch(${from + (to - from) * share} 0.12 ${hue + turn * share})`;
  });
  theme.palette = [...theme.classes, ...theme.scale, theme.quiet];
  frame = null; // its background and its points are of another theme
}

/* How every image looks as a point, computed once per coloring, not once per frame: a color of the
   palette and a shape, as one number. */
const look = new Uint16Array(data.count);
const QUIET = COLORS + SCALE_STEPS; // in the palette
const styleOf = (color, shape) => color * SHAPES.length + shape;
const colorOf = (style) => theme.palette[Math.floor(style / SHAPES.length)];

function updateLook() {
  const coloring = currentColoring();
  const classes = !coloring || hasClasses(coloring);
  const [low, high] = classes ? [0, 0] : range(coloring);
  for (let i = 0; i < data.count; i++) {
    const value = coloring ? coloring.values[i] : 0;
    const unknown = Number.isNaN(value) || (value < 0 && classes);
    const share = high > low ? (value - low) / (high - low) : 0;
    const shape = classes && !unknown ? value % SHAPES.length : 0;
    const step = COLORS + Math.round((SCALE_STEPS - 1) * share);
    look[i] = styleOf(unknown ? QUIET : classes ? value % COLORS : step, shape);
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

/* ---- thumbnails ---- */

/* Sheets are decoded when one of their images is first drawn. Those that were used longest ago are
   let go: a hundred take 240 MB. Those of the last frame are not, or it would never be whole. */
const sheets = new Map(); // the last one used is the last

const sheetNumber = (i) => Math.floor(i / data.perSheet);

function sheetOf(i) {
  const at = sheetNumber(i);
  const sheet = sheets.get(at) ?? newSheet(at);
  sheets.delete(at);
  sheets.set(at, sheet);
  return sheet;
}

function newSheet(at) {
  const sheet = {};
  sheet.loading = decodedSheet(at).then((bitmap) => {
    sheet.bitmap = bitmap;
    if (bitmap) redraw();
    else sheets.delete(at); // so that it is asked for again
  });
  return sheet;
}

function letGoOfSheets() {
  const most = Math.max(MAX_SHEETS, new Set([...drawnImages.keys()].map(sheetNumber)).size);
  for (const at of sheets.keys()) if (sheets.size > most) sheets.delete(at);
}

function decodedSheet(at) {
  if (!data.files) return createImageBitmap(new Blob([decodeBase64(data.sheets[at])]));
  const image = make("img", { src: `${data.files}/${at}.webp` });
  return image.decode().then(() => image, lackFiles);
}

function paste({ bitmap }, brush, i, x, y, side) {
  if (!bitmap) return;
  const at = i % data.perSheet;
  const left = (at % data.columns) * data.side;
  const top = Math.floor(at / data.columns) * data.side;
  brush.drawImage(bitmap, left, top, data.side, data.side, x, y, side, side);
}

function tile(i) {
  const element = make("canvas", { width: data.side, height: data.side, className: "tile" });
  const sheet = sheetOf(i);
  sheet.loading.then(() => paste(sheet, element.getContext("2d"), i, 0, 0, data.side));
  return element;
}

/* ---- points ---- */

let redrawPending = 0;
let drawnImages = new Map(); // points drawn as images: where each lies, [x, y, side]

function redraw() {
  redrawPending ||= requestAnimationFrame(() => { redrawPending = 0; draw(); });
}

/* The more room there is per point, the larger it is: of a million, hardly more than a pixel. */
function radius() {
  const room = Math.sqrt((box.width * box.height) / data.count);
  const small = Math.min(5, Math.max(Math.min(1.8, 0.5 + 0.25 * room), 0.15 * room));
  return Math.min(MAX_RADIUS, small * Math.max(1, zoomLevel()) ** 0.3);
}

/* Points are written straight into the pixels of a frame that is larger than the map on every
   side, so that none has to be clipped. Copied by the canvas, one by one, they take ten times
   as long. */
let frame = null;

function currentFrame() {
  if (!frame) {
    const margin = Math.ceil(1.3 * MAX_RADIUS * box.ratio) + 3;
    const width = canvas.width + 2 * margin;
    const image = new ImageData(width, canvas.height + 2 * margin);
    const background = painted(1, (brush) => {
      brush.fillStyle = theme.card;
      brush.fillRect(0, 0, 1, 1);
    })[0];
    const pixels = new Uint32Array(image.data.buffer);
    frame = { margin, width, image, background, pixels, sprites: new Map() };
  }
  return frame;
}

/* The pixels of a square after `paint` has drawn on it: opacity first, then blue, green, red. */
function painted(side, paint) {
  const element = make("canvas", { width: side, height: side });
  const brush = element.getContext("2d", { willReadFrequently: true });
  paint(brush);
  return new Uint32Array(brush.getImageData(0, 0, side, side).data.buffer);
}

/* The colors of a point of this style, and where they go relative to its middle. */
function sprite(style, size) {
  const { margin, width } = frame;
  const side = 2 * margin + 1;
  // Of so few pixels that no shape shows: without halo and soft edge, nothing has to be mixed.
  const tiny = size < MIN_HALO * box.ratio;
  const pixels = painted(side, (brush) => {
    const lineWidth = Math.min(2.5 * box.ratio / size, 0.6);
    Object.assign(brush, { fillStyle: colorOf(style), strokeStyle: theme.card, lineWidth });
    brush.setTransform(size, 0, 0, size, margin + 0.5, margin + 0.5);
    const shape = SHAPES[tiny ? 0 : style % SHAPES.length];
    if (!tiny) brush.stroke(shape); // a thin halo
    brush.fill(shape);
  });
  if (tiny) pixels.forEach((color, at) => { pixels[at] = color >>> 31 ? color | 0xff000000 : 0; });
  const covered = Uint32Array.from(pixels.keys()).filter((at) => pixels[at] >>> 24);
  return {
    offsets: Int32Array.from(covered, (at) => {
      return (Math.floor(at / side) - margin) * width + (at % side) - margin;
    }),
    colors: covered.map((at) => pixels[at]),
  };
}

function stamp({ offsets, colors }, target, at) {
  for (let k = 0; k < offsets.length; k++) {
    const to = at + offsets[k];
    const opacity = colors[k] >>> 24;
    target[to] = opacity === 255 ? colors[k] : mix(target[to], colors[k], opacity);
  }
}

/* Blends two colors, two channels at a time. */
function mix(under, over, share) {
  const rest = 256 - share;
  const redBlue = ((under & 0xff00ff) * rest + (over & 0xff00ff) * share) >>> 8;
  const green = ((under & 0xff00) * rest + (over & 0xff00) * share) >>> 8;
  return (0xff000000 | (redBlue & 0xff00ff) | (green & 0xff00)) >>> 0;
}

/* Shuffled by a prime step: in the order of the data, the last class would cover all others. Images
   with files beside the page lie in the order of the map, and are shuffled among those near them,
   as neighbors share the memory that they are drawn to: a frame of a million takes a fifth less. */
const drawOrder = new Uint32Array(data.count);
for (let start = 0; start < data.count; start += data.perFile) {
  const size = Math.min(data.perFile, data.count - start);
  const prime = [7919, 7907, 7901].find((each) => size % each) ?? 1;
  for (let at = 0; at < size; at++) drawOrder[start + at] = start + ((at * prime) % size);
}

/* While something is highlighted or selected, everything else is faint. */
function faint(i) {
  const { highlighted, selected } = state;
  return (highlighted !== null && classOf(i) !== highlighted)
    || (selected.size > 0 && !selected.has(i));
}

/* What is drawn, in this order: the faint points first. Side by side, as a frame reads all of them. */
let points = null;

function arranged() {
  const [row, style] = [new Uint32Array(data.count), new Uint16Array(data.count)];
  const [x, y] = [new Float32Array(data.count), new Float32Array(data.count)];
  const someFaint = state.highlighted !== null || state.selected.size > 0;
  let total = 0;
  for (const faintOnes of [true, false]) {
    for (const i of drawOrder) {
      const isFaint = (someFaint && faint(i)) || look[i] >= styleOf(QUIET, 0);
      if (!state.visible[i] || isFaint !== faintOnes) continue;
      row[total] = i;
      x[total] = data.xy[2 * i];
      y[total] = data.xy[2 * i + 1];
      style[total++] = isFaint ? styleOf(QUIET, look[i] % SHAPES.length) : look[i];
    }
  }
  return { row, style, x, y, total };
}

/* After a change of what is shown or faint. */
function restyle() {
  points = null;
  redraw();
}

/* Draws all points, and returns those in view: at most one more than could be drawn as images. */
function drawPoints() {
  const { pixels, margin, width, image, background, sprites } = currentFrame();
  const { row, style, x, y, total } = points ??= arranged();
  const size = Math.round(4 * radius() * box.ratio) / 4;
  const ofSize = sprites.get(size) ?? sprites.set(size, []).get(size);
  const scale = state.view.scale * box.ratio;
  const [left, top] = toScreen(0, 0).map((at) => at * box.ratio + margin);
  const low = margin - box.ratio; // a point just outside reaches into the map
  const [right, bottom] = [image.width - low, image.height - low];
  const inView = [];
  pixels.fill(background);
  for (let at = 0; at < total; at++) {
    const px = (left + x[at] * scale + 0.5) | 0; // rounded
    const py = (top - y[at] * scale + 0.5) | 0;
    if (px < low || py < low || px > right || py > bottom) continue;
    stamp(ofSize[style[at]] ??= sprite(style[at], size), pixels, py * width + px);
    if (inView.length <= MAX_IMAGES) inView.push(row[at]);
  }
  pen.putImageData(image, -margin, -margin);
  return inView;
}

function draw() {
  const inView = drawPoints();
  pen.setTransform(box.ratio, 0, 0, box.ratio, 0, 0);
  drawnImages = new Map();
  if (zoomLevel() >= IMAGE_ZOOM && inView.length <= MAX_IMAGES) drawImages(inView);
  letGoOfSheets();
  for (const i of state.labeled) {
    if (state.visible[i] && inside(...screenPoint(i))) drawRing(i, 2, theme.ink);
  }
  if (state.open >= 0 && detailsOf(state.open)) drawNeighbors(state.open);
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
  pen.fillStyle = faint(i) ? theme.quiet : colorOf(look[i]);
  pen.fillRect(x - side / 2 - 2, y - side / 2 - 2, side + 4, side + 4);
  if (faint(i)) pen.globalAlpha = 0.4;
  pen.imageSmoothingEnabled = data.side >= 32;
  paste(sheetOf(i), pen, i, x - side / 2, y - side / 2, side);
  pen.globalAlpha = 1;
  drawnImages.set(i, [x, y, side]);
}

function stroke(path, width, color, opacity = 1) {
  Object.assign(pen, { lineWidth: width, strokeStyle: color, globalAlpha: opacity });
  pen.stroke(path);
  pen.globalAlpha = 1;
}

function drawNeighbors(i) {
  for (const other of neighbors(i)) {
    stroke(new Path2D(`M${screenPoint(i)}L${screenPoint(other)}`), 1, theme.ink, 0.55);
  }
  for (const other of neighbors(i)) drawRing(other, 1.5, theme.ink);
}

function drawRing(i, width, color) {
  const [x, y] = screenPoint(i);
  const side = drawnImages.get(i)?.[2] + 4;
  const ring = new Path2D();
  if (side) ring.rect(x - side / 2, y - side / 2, side, side);
  else ring.arc(x, y, radius() + 3 + width / 2, 0, 2 * Math.PI);
  stroke(ring, width, color);
}

function drawCross(x, y) {
  const cross = new Path2D(`M${x - 11} ${y}h22M${x} ${y - 11}v22`);
  stroke(cross, 6, theme.card);
  stroke(cross, 3, theme.accent);
}

function drawLasso() {
  const lasso = new Path2D();
  for (const point of state.lasso) lasso.lineTo(...toScreen(...point));
  lasso.closePath();
  pen.fillStyle = theme.accent;
  pen.globalAlpha = 0.12;
  pen.fill(lasso);
  pen.setLineDash([5, 4]);
  stroke(lasso, 2, theme.accent);
  pen.setLineDash([]);
}
