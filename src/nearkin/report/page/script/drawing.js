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
  frame = null; // its background and its points are of another theme
}

/* How every image looks as a point, computed once per coloring, not once per frame. */
const look = { color: [], shape: new Uint8Array(data.count) };

function updateLook() {
  const coloring = currentColoring();
  const classes = !coloring || hasClasses(coloring);
  const [low, high] = classes ? [0, 0] : range(coloring);
  for (let i = 0; i < data.count; i++) {
    const value = coloring ? coloring.values[i] : 0;
    const unknown = Number.isNaN(value) || (value < 0 && classes);
    const share = high > low ? (value - low) / (high - low) : 0;
    look.shape[i] = classes && !unknown ? value % SHAPES.length : 0;
    if (unknown) look.color[i] = theme.quiet;
    else if (classes) look.color[i] = theme.classes[value % COLORS];
    else look.color[i] = theme.scale[Math.round((SCALE_STEPS - 1) * share)];
  }
}

function range(coloring) {
  const known = coloring.values.filter((value) => !Number.isNaN(value)).sort();
  return known.length ? [known[0], known.at(-1)] : [0, 0];
}

/* ---- thumbnails ---- */

/* Sheets are decoded when one of their images is first drawn: all of them would take 200 MB. */
const sheets = data.sheets.map((encoded) => ({ encoded }));

function sheetOf(i) {
  const sheet = sheets[Math.floor(i / data.perSheet)];
  sheet.loading ??= createImageBitmap(new Blob([decodeBase64(sheet.encoded)])).then((bitmap) => {
    Object.assign(sheet, { bitmap, encoded: "" });
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

let redrawPending = 0;
let drawnImages = []; // points drawn as images, for the pointer: [i, x, y, side]

function redraw() {
  redrawPending ||= requestAnimationFrame(() => { redrawPending = 0; draw(); });
}

/* The more room there is per point, the larger it is. */
function radius() {
  const room = Math.sqrt((box.width * box.height) / data.count);
  const small = Math.min(5, Math.max(1.8, 0.15 * room));
  return Math.min(MAX_RADIUS, small * Math.max(1, zoomLevel()) ** 0.3);
}

/* Points are written straight into the pixels of a frame that is larger than the map on every
   side, so that none has to be clipped: 20,000 take a few milliseconds. Copied by the canvas, one
   by one, they take ten times that. */
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
    frame = { margin, width, image, background, pixels: pixelsOf(image), sprites: new Map() };
  }
  return frame;
}

/* Colors as they lie in memory: opacity first, then blue, green, red. */
function pixelsOf(image) {
  return new Uint32Array(image.data.buffer);
}

/* The pixels of a square after `paint` has drawn on it. */
function painted(side, paint) {
  const element = make("canvas", { width: side, height: side });
  const brush = element.getContext("2d", { willReadFrequently: true });
  paint(brush);
  return pixelsOf(brush.getImageData(0, 0, side, side));
}

/* The colors of a point of this look, and where they go relative to its middle. */
function sprite(shape, color, size) {
  const { margin, width } = frame;
  const side = 2 * margin + 1;
  const pixels = painted(side, (brush) => {
    const lineWidth = Math.min(2.5 * box.ratio / size, 0.6);
    Object.assign(brush, { fillStyle: color, strokeStyle: theme.card, lineWidth });
    brush.setTransform(size, 0, 0, size, margin + 0.5, margin + 0.5);
    brush.stroke(SHAPES[shape]); // a thin halo
    brush.fill(SHAPES[shape]);
  });
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
  const { pixels, margin, width, image, background, sprites } = currentFrame();
  const size = Math.round(4 * radius() * box.ratio) / 4;
  const inView = [];
  pixels.fill(background);
  for (const faintOnes of [true, false]) {
    for (const i of drawOrder) {
      const isFaint = faint(i) || look.color[i] === theme.quiet;
      if (!state.visible[i] || isFaint !== faintOnes) continue;
      const [x, y] = screenPoint(i);
      if (!inside(x, y, -1)) continue;
      const color = isFaint ? theme.quiet : look.color[i];
      const key = SHAPES.length * 4 * size + look.shape[i];
      const ofColor = sprites.get(color) ?? sprites.set(color, new Map()).get(color);
      if (!ofColor.has(key)) ofColor.set(key, sprite(look.shape[i], color, size));
      const at = (Math.round(y * box.ratio) + margin) * width + Math.round(x * box.ratio) + margin;
      stamp(ofColor.get(key), pixels, at);
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
  pen.fillStyle = faint(i) ? theme.quiet : look.color[i];
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
