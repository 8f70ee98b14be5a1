import { $, send } from "./base.js";

$("#sign-out")?.addEventListener("click", async () => { await send("POST", "sign-out", {}); location.href = "sign-in"; });
