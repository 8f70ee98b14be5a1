// @ts-check
// Images attached to the next message: selected, dropped or pasted. They are kept in this tab only.
import { $, el, icon, notify } from "./dom.js";
import { send, up } from "./net.js";
import { t } from "./words.js";

const MOST_BYTES = 20_000_000;
/** @typedef {{url?: string, name: string, width: number, height: number, tokens?: number}} Attachment */

/** Return the caption of an image. @param {Attachment} image */
const caption = (image) =>
  image.tokens === undefined
    ? `${image.name} ${image.width}x${image.height}`
    : t("image_of_tokens", { name: image.name, width: image.width, height: image.height, tokens: image.tokens });

/** Create thumbnails. @param {Attachment[]} images @param {(image: Attachment) => void} [remove] */
export const thumbs = (images, remove) =>
  images.map((image) =>
    el(
      "figure",
      { class: "thumb" },
      image.url ? el("img", { src: image.url, alt: image.name }) : icon("image"),
      el("figcaption", {}, image.url ? caption(image) : `${caption(image)} ${t("image_not_kept")}`),
      remove &&
        el(
          "button",
          {
            type: "button",
            class: "quiet square",
            "aria-label": t("remove_image", { name: image.name }),
            onclick: () => remove(image),
          },
          "×",
        ),
    ),
  );

/** Content of a message: text, or images and text. @param {string} text @param {Attachment[]} [images] */
export const contentOf = (text, images = []) => {
  const sent = images.filter((image) => image.url);
  if (!sent.length) return text;
  return [
    ...sent.map((image) => ({ type: "image_url", image_url: { url: image.url } })),
    ...(text ? [{ type: "text", text }] : []),
  ];
};
/** Return turns without image data, as they are saved on the server. @param {any[]} turns @returns {any[]} */
export const withoutPixels = (turns) =>
  turns.map((turn) => ({
    ...turn,
    ...(turn.before ? { before: withoutPixels(turn.before) } : {}),
    ...(turn.images
      ? { images: turn.images.map((/** @type {Attachment} */ one) => ({ ...one, url: undefined })) }
      : {}),
  }));
/** Load the image data of a message's images that the server provides. @param {any[]} images */
const fetched = (images) =>
  Promise.all(
    images.map(async ({ path, ...image }) => {
      const response = await fetch(`${up}api/images?whole=1&path=${encodeURIComponent(path)}`);
      if (!response.ok) return image;
      const blob = await response.blob();
      return { ...image, url: await dataUri(new Blob([blob], { type: "image/any" })) };
    }),
  );

/** Load the image data of a record, including its earlier messages. @param {any} record */
export const withImages = async (record) => {
  for (const one of [record, ...record.before]) one.images = one.images?.length ? await fetched(one.images) : undefined;
  return record;
};

/** The images attached to the next message. */
export class Attached {
  /** @type {Attachment[]} */
  images = [];

  /** @param {() => string | undefined} engine the engine that counts tokens, if one is ready */
  constructor(engine) {
    this.engine = engine;
    const pick = $("#pick-image"),
      place = $(".chat");
    $("#add-image").addEventListener("click", () => pick.click());
    pick.addEventListener("change", () => {
      void this.add([...pick.files]);
      pick.value = "";
    });
    $("#message").addEventListener("paste", (/** @type {ClipboardEvent} */ event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length) event.preventDefault();
      void this.add(files);
    });
    place.addEventListener("dragover", (/** @type {DragEvent} */ event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    place.addEventListener("drop", (/** @type {DragEvent} */ event) => {
      const files = [...(event.dataTransfer?.files ?? [])];
      if (files.length) event.preventDefault();
      void this.add(files);
    });
  }
  /** @param {File[]} files */
  async add(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) notify(t("not_an_image", { name: file.name }));
      else if (file.size > MOST_BYTES) notify(t("image_too_large", { name: file.name }));
      else await this.read(file);
    }
  }
  /** @param {File} file */
  async read(file) {
    const url = await dataUri(file),
      size = await sizeOf(url);
    if (!size) {
      notify(t("not_an_image", { name: file.name }));
      return;
    }
    /** @type {Attachment} */
    const image = { url, name: file.name || "image", ...size };
    this.images.push(image);
    this.show();
    const engine = this.engine();
    if (!engine) return;
    try {
      const messages = [{ role: "user", content: contentOf("", [image]) }];
      image.tokens = (await send("POST", `api/chat/${engine}/tokens`, { messages })).images?.[0]?.tokens;
    } catch (failed) {
      notify(failed instanceof Error ? failed.message : String(failed));
    }
    this.show();
  }
  show() {
    const remove = (/** @type {Attachment} */ image) => {
      this.images = this.images.filter((one) => one !== image);
      this.show();
    };
    $("#attached").replaceChildren(...thumbs(this.images, remove));
    $("#attached").hidden = !this.images.length;
  }
  /** Return and detach the images. */
  take() {
    const taken = this.images;
    this.images = [];
    this.show();
    return taken;
  }
}
/** @param {Blob} file @returns {Promise<string>} */
const dataUri = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
/** Width and height as displayed by the browser; null if it cannot decode the image. @param {string} url */
const sizeOf = (url) =>
  new Promise((resolve) => {
    const image = new Image();
    image.onload = () => resolve({ width: image.naturalWidth, height: image.naturalHeight });
    image.onerror = () => resolve(null);
    image.src = url;
  });
