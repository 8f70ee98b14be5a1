// @ts-check
// Thumbnails of dataset images, which the server creates for files below web_roots.
import { el } from "./dom.js";
import { visible } from "./format.js";
import { up } from "./net.js";
import { t } from "./words.js";

/** Create a thumbnail of a dataset image with its name. @param {string} path @param {string} [caption] */
export function smallImage(path, caption = path.split("/").at(-1)) {
  const image = el("img", { src: `${up}api/images?path=${encodeURIComponent(path)}`, alt: caption, loading: "lazy" });
  image.addEventListener("error", () => image.replaceWith(el("span", { class: "hint" }, t("image_not_shown"))));
  return el("figure", { class: "thumb", title: path }, image, el("figcaption", {}, visible(caption ?? "")));
}
