// @ts-check
// Images of data sets, which the server shows small if they are below its roots.
import { el } from "./dom.js";
import { visible } from "./format.js";
import { up } from "./net.js";
import { t } from "./words.js";

/** An image of a data set, small, with its name. @param {string} path @param {string} [caption] */
export function smallImage(path, caption = path.split("/").at(-1)) {
  const image = el("img", { src: `${up}api/images?path=${encodeURIComponent(path)}`, alt: caption, loading: "lazy" });
  image.addEventListener("error", () => image.replaceWith(el("span", { class: "hint" }, t("image_not_shown"))));
  return el("figure", { class: "thumb", title: path }, image, el("figcaption", {}, visible(caption ?? "")));
}
