"use strict";
/* Switches between light and dark; prints in light, with everything unfolded. */
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  prefersDark.addEventListener("change", name);
  let themeBefore, printing = false;
  addEventListener("beforeprint", () => {
    if (printing) return;
    printing = true;
    themeBefore = root.dataset.theme;
    root.dataset.theme = "light";
    for (const element of document.querySelectorAll("details")) element.open = true;
  });
  addEventListener("afterprint", () => {
    printing = false;
    if (themeBefore === undefined) delete root.dataset.theme; else root.dataset.theme = themeBefore;
  });
  name();
})();
