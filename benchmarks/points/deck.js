// deck.gl: a ScatterplotLayer with binary attributes.
import { Deck, OrthographicView } from "@deck.gl/core";
import { ScatterplotLayer } from "@deck.gl/layers";

globalThis.mount = (place, { x, y, of, colors, size }) => new Promise((done) => {
  const position = new Float32Array(2 * x.length);
  const color = new Uint8Array(4 * x.length);
  const rgb = colors.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  for (let i = 0; i < x.length; i++) {
    position.set([x[i], y[i]], 2 * i);
    color.set([...rgb[of[i]], 204], 4 * i);
  }
  const { height } = place.getBoundingClientRect();
  const layer = new ScatterplotLayer({
    id: "points",
    data: {
      length: x.length,
      attributes: { getPosition: { value: position, size: 2 }, getFillColor: { value: color, size: 4 } },
    },
    radiusUnits: "pixels", getRadius: size / 2,
  });
  const viewState = (cx, cy, zoom) => {
    return { target: [cx, cy, 0], zoom: Math.log2((height / 2) * zoom) };
  };
  let drawn = false;
  const deck = new Deck({
    parent: place, views: new OrthographicView({ flipY: false }), layers: [layer],
    viewState: viewState(0, 0, 1),
    onAfterRender: () => {
      if (drawn || !layer.isLoaded) return;
      drawn = true;
      done((...view) => deck.setProps({ viewState: viewState(...view) }));
    },
  });
});
