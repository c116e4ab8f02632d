"use strict";
(() => {
  const place = document.querySelector("[data-live]");
  if (!place) return;
  const EVERY_MS = 2000;
  const refresh = async () => {
    try {
      const reply = await fetch(place.dataset.live, { cache: "no-store" });
      if (!reply.ok) return;
      const text = await reply.text();
      const had = place.childElementCount;
      const page = new DOMParser().parseFromString(text, "text/html");
      place.replaceChildren(...page.body.childNodes);
      place.dataset.refreshed = String(Number(place.dataset.refreshed || 0) + 1);
      if (had && had !== place.childElementCount) location.reload();
    } catch { /* the server does not respond: keep the last values */ }
  };
  setInterval(refresh, EVERY_MS);
})();
