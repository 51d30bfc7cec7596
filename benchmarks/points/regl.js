// regl-scatterplot: one draw call of round points.
import createScatterplot from "regl-scatterplot";

globalThis.mount = async (place, { x, y, of, colors, size }) => {
  const canvas = document.createElement("canvas");
  place.append(canvas);
  const { width, height } = place.getBoundingClientRect();
  const plot = createScatterplot({
    canvas, width, height, pointSize: size, pointColor: colors, colorBy: "valueA", opacity: 0.8,
  });
  await plot.draw({ x, y, valueA: of }, { zDataType: "categorical" });
  // Its camera looks at [-1, 1] from a distance of 1.
  return (cx, cy, zoom) => plot.set({ cameraTarget: [cx, cy], cameraDistance: 1 / zoom });
};
