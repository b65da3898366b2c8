import { element } from "./dom.js";

const PREVIEW_PIXELS = 192;

/** An image that the user adds. Its preview is drawn on a canvas, so that the page needs to load nothing. */
export class Image {
  constructor(name, url, bitmap) {
    this.name = name;
    this.url = url;
    this.bitmap = bitmap;
  }

  /** Reads a file; throws for what the browser does not know as an image. */
  static async read(file) {
    let bitmap;
    try {
      bitmap = await createImageBitmap(file);
    } catch {
      throw new Error(`${file.name} is not an image that this browser can read.`);
    }
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => resolve(reader.result));
      reader.addEventListener("error", () => reject(reader.error));
      reader.readAsDataURL(file);
    });
    return new Image(file.name, url, bitmap);
  }

  /** How a message holds it. */
  part() {
    return { type: "image_url", image_url: { url: this.url } };
  }

  preview(className) {
    const scale = Math.min(1, PREVIEW_PIXELS / Math.max(this.bitmap.width, this.bitmap.height));
    const width = Math.max(1, Math.round(this.bitmap.width * scale));
    const height = Math.max(1, Math.round(this.bitmap.height * scale));
    const label = `Image ${this.name}, ${this.bitmap.width} × ${this.bitmap.height}`;
    const canvas = element("canvas", { class: className, width, height, role: "img", "aria-label": label });
    canvas.getContext("2d").drawImage(this.bitmap, 0, 0, width, height);
    return canvas;
  }
}
