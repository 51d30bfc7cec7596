/* What listens to what. */

function listen() {
  $("coloring").addEventListener("change", (event) => recolor(Number(event.target.value)));
  $("filter").addEventListener("input", (event) => { state.wanted = event.target.value; choose(); });
  $("in").addEventListener("click", () => zoom(1.5));
  $("out").addEventListener("click", () => zoom(1 / 1.5));
  $("fit").addEventListener("click", () => glide(fitted()));
  $("lasso").addEventListener("click", () => drawing(!state.drawing));
  $("table").addEventListener("toggle", showTable);
  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("keydown", key);
  canvas.addEventListener("blur", hideTip);
  $("panel").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  addEventListener("hashchange", openFromAddress);
  dark.addEventListener("change", () => { readTheme(); dress(); showLegend(); redraw(); });
  new ResizeObserver(resize).observe(canvas);
}

readTheme();
showPanel();
resize();
recolor(0);
drawing(false);
listen();
openFromAddress();
if (served) serve();
