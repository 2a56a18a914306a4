// Drawing on canvases: sharp on every screen, sized by the page, with a text where the pointer is.

/** A canvas that draws itself when its data, its size or the colours change.
 *
 * draw(context, width, data, colours) -> the height it took, or undefined where CSS gives the
 * height; find(x, y, data) -> the text at a place, or null. Lengths are CSS pixels.
 */
export class Chart {
  constructor(canvas, draw, find = null) {
    this.canvas = canvas;
    this.draw = draw;
    this.data = null;
    new ResizeObserver(() => this.#paint()).observe(canvas.parentElement);
    scheme.addEventListener("change", () => this.#paint());
    if (find) {
      this.find = find;
      canvas.addEventListener("pointermove", event => this.#point(event));
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    }
  }

  show(data) {
    this.data = data;
    this.#paint();
  }

  /** Sets the height in CSS pixels and returns a cleared context. */
  surface(height = this.canvas.clientHeight) {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const pixels = [Math.round(canvas.clientWidth * scale), Math.round(height * scale)];
    if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) {
      [canvas.width, canvas.height] = pixels;
      if (Math.abs(canvas.clientHeight - height) > 0.5) canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, height);
    return context;
  }

  #paint() {
    if (this.data !== null && this.canvas.clientWidth > 0) this.draw(this, this.data, colours());
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const text = this.data === null ? null
      : this.find(event.clientX - box.left, event.clientY - box.top, this.data);
    tip.hidden = text === null;
    if (text === null) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 8}px`;
  }
}

const tip = document.getElementById("tip");
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const NAMES = ["free", "cached", "held", "shared", "work", "line", "surface", "soft"];
let known = null;
scheme.addEventListener("change", () => { known = null; });

function colours() {
  if (known === null) {
    const style = getComputedStyle(document.documentElement);
    known = Object.fromEntries(NAMES.map(n => [n, style.getPropertyValue(`--${n}`).trim()]));
  }
  return known;
}

/** A number with separators for thousands. */
export const count = new Intl.NumberFormat("en").format;

/** "1 page", "2 pages". */
export const of = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
