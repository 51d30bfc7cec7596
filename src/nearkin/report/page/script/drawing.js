/* A frame of the map. */

/* Points are written straight into the pixels of a frame that is wider than the map on every
   side, so that none needs to be cut at the edge: 20,000 take a few milliseconds. */
let frame = null;
let waiting = false;
let images = []; // those drawn as images, for the pointer: [i, x, y, side]

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

/* Of a point: the more room there is for each, the larger. */
function radius() {
  const room = Math.sqrt((box.width * box.height) / data.count);
  const small = Math.min(5, Math.max(1.8, 0.15 * room));
  return Math.min(LARGEST, small * Math.max(1, enlarged()) ** 0.3);
}

function framed() {
  frame ??= emptyFrame();
  const size = Math.round(4 * radius() * box.ratio) / 4;
  if (!frame.masks.has(size)) {
    frame.masks.set(size, SHAPES.map((_, shape) => mask(shape, size, frame.margin, frame.width)));
  }
  return { ...frame, masks: frame.masks.get(size) };
}

function emptyFrame() {
  const margin = Math.ceil(1.3 * LARGEST * box.ratio) + 3;
  const width = canvas.width + 2 * margin;
  const image = new ImageData(width, canvas.height + 2 * margin);
  return { margin, width, image, masks: new Map(), pixels: new Uint32Array(image.data.buffer) };
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
  const cover = (paint) => {
    const held = make("canvas", { width: side, height: side });
    const brush = held.getContext("2d", { willReadFrequently: true });
    brush.lineWidth = Math.min(2.5 * box.ratio, 0.6 * size);
    trace(brush, shape, margin + 0.5, margin + 0.5, size);
    paint(brush);
    return brush.getImageData(0, 0, side, side).data.filter((_, at) => at % 4 === 3);
  };
  const core = cover((brush) => brush.fill());
  const halo = cover((brush) => { brush.fill(); brush.stroke(); });
  const touched = Array.from(halo.keys()).filter((at) => halo[at]);
  return {
    offset: Int32Array.from(touched, (at) => {
      return (Math.floor(at / side) - margin) * width + (at % side) - margin;
    }),
    core: Uint8Array.from(touched, (at) => core[at]),
    halo: Uint8Array.from(touched, (at) => halo[at]),
  };
}

/* Two channels at a time; both colors are opaque. */
function mix(under, over, share) {
  const rest = 256 - share;
  const redBlue = ((under & 0xff00ff) * rest + (over & 0xff00ff) * share) >>> 8;
  const green = ((under & 0xff00) * rest + (over & 0xff00) * share) >>> 8;
  return (0xff000000 | (redBlue & 0xff00ff) | (green & 0xff00)) >>> 0;
}

function stamp({ offset, core, halo }, target, at, tone, paper) {
  for (let k = 0; k < offset.length; k++) {
    const where = at + offset[k];
    if (core[k] === 255) target[where] = tone;
    else target[where] = mix(mix(target[where], paper, halo[k]), tone, core[k]);
  }
}

/* Images in no order of their own: else the last class would lie on top of all others. */
const order = shuffled();

function shuffled() {
  const step = [7919, 7907, 7901].find((prime) => data.count % prime) ?? 1;
  return Uint32Array.from({ length: data.count }, (_, at) => (at * step) % data.count);
}

/* While something is pointed out or selected, all else steps back. */
function quiet(i) {
  const { marked, selected } = state;
  return (marked !== null && classOf(i) !== marked) || (selected.size > 0 && !selected.has(i));
}

function splat() {
  const { pixels, margin, width, masks, image } = framed();
  const paper = theme.tones[COLORS];
  const inView = [];
  pixels.fill(paper);
  const place = (i, faint) => {
    const [x, y] = spot(i);
    if (!inside(x, y, -1)) return;
    const at = (Math.round(y * box.ratio) + margin) * width + Math.round(x * box.ratio) + margin;
    stamp(masks[look.shape[i]], pixels, at, faint ? theme.tones[COLORS + 1] : look.tone[i], paper);
    inView.push(i);
  };
  const faint = (i) => quiet(i) || look.tone[i] === theme.tones[COLORS + 1];
  for (const i of order) if (state.shown[i] && faint(i)) place(i, true);
  for (const i of order) if (state.shown[i] && !faint(i)) place(i, false);
  pen.putImageData(image, -margin, -margin);
  return inView;
}

function draw() {
  const inView = splat();
  pen.setTransform(box.ratio, 0, 0, box.ratio, 0, 0);
  images = [];
  if (enlarged() >= PICTURES_FROM && inView.length <= MOST_PICTURES) drawImages(inView);
  if (state.open >= 0) drawNeighbors(state.open);
  if (state.cursor >= 0) ring(state.cursor, 3, theme.accent);
  if (state.found) cross(...onScreen(...state.found));
  if (state.lasso) drawLasso();
  pen.setTransform(1, 0, 0, 1, 0, 0);
}

/* An image stands where no other has been drawn yet; the rest remain points under it. */
function drawImages(inView) {
  const side = Math.min(72, 24 + 5 * enlarged());
  const taken = new Map();
  const cell = (x, y) => Math.floor(x / side) * 65536 + Math.floor(y / side);
  const free = (x, y) => {
    for (const dx of [-side, 0, side]) {
      for (const dy of [-side, 0, side]) {
        const other = taken.get(cell(x + dx, y + dy));
        if (other && Math.abs(other[0] - x) < side && Math.abs(other[1] - y) < side) return false;
      }
    }
    return true;
  };
  inView.reverse(); // what stands out was drawn last, and comes first here
  for (const i of state.cursor >= 0 ? [state.cursor, ...inView] : inView) {
    const [x, y] = spot(i);
    if (!free(x, y)) continue;
    taken.set(cell(x, y), [x, y]);
    drawImage(i, x, y, side - 6);
  }
}

function drawImage(i, x, y, side) {
  pen.fillStyle = quiet(i) ? theme.quiet : cssOf(i);
  pen.fillRect(x - side / 2 - 2, y - side / 2 - 2, side + 4, side + 4);
  if (quiet(i)) pen.globalAlpha = 0.4;
  pen.imageSmoothingEnabled = data.side >= 32;
  paste(pen, i, x - side / 2, y - side / 2, side);
  pen.globalAlpha = 1;
  images.push([i, x, y, side]);
}

function drawNeighbors(i) {
  const [x, y] = spot(i);
  pen.strokeStyle = theme.ink;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.55;
  for (const other of neighbors(i)) {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(...spot(other));
    pen.stroke();
  }
  pen.globalAlpha = 1;
  for (const other of neighbors(i)) ring(other, 1.5, theme.ink);
}

function ring(i, width, color) {
  const [x, y] = spot(i);
  const held = images.find(([other]) => other === i);
  pen.lineWidth = width;
  pen.strokeStyle = color;
  pen.beginPath();
  if (held) pen.rect(x - held[3] / 2 - 2, y - held[3] / 2 - 2, held[3] + 4, held[3] + 4);
  else pen.arc(x, y, radius() + 3 + width / 2, 0, 2 * Math.PI);
  pen.stroke();
}

function cross(x, y) {
  for (const [width, color] of [[6, theme.paper], [3, theme.accent]]) {
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
  for (const at of state.lasso) pen.lineTo(...onScreen(...at));
  pen.closePath();
  pen.fillStyle = theme.accent;
  pen.globalAlpha = 0.12;
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.accent;
  pen.lineWidth = 2;
  pen.setLineDash([5, 4]);
  pen.stroke();
  pen.setLineDash([]);
}
