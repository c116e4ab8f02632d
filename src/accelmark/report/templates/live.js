"use strict";
(() => {
  const place = document.querySelector("[data-live]");
  if (!place) return;
  const EVERY_MS = 2000;
  const look = async () => {
    try {
      const reply = await fetch(place.dataset.live, { cache: "no-store" });
      if (!reply.ok) return;
      const text = await reply.text();
      const had = place.childElementCount;
      const page = new DOMParser().parseFromString(text, "text/html");
      place.replaceChildren(...page.body.childNodes);
      place.dataset.looked = String(Number(place.dataset.looked || 0) + 1);
      if (had && had !== place.childElementCount) location.reload();
    } catch { /* the server is gone for the moment: what was seen last stays */ }
  };
  setInterval(look, EVERY_MS);
})();
