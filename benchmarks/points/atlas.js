// The view of Embedding Atlas, which draws with WebGPU, or with WebGL 2 where there is none.
import { EmbeddingView } from "embedding-atlas";

globalThis.mount = async (place, { x, y, of, colors, size }) => {
  const { width, height } = place.getBoundingClientRect();
  const props = {
    data: { x, y, category: Uint8Array.from(of) }, categoryColors: colors, width, height,
    config: { mode: "points", pointSize: size },
    viewportState: { x: 0, y: 0, scale: 1 },
  };
  const view = new EmbeddingView(place, props);
  return (cx, cy, zoom) => view.update({ ...props, viewportState: { x: cx, y: cy, scale: zoom } });
};
