// Before anything is drawn: the theme that was chosen here, or the system's.
(() => {
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* a private window keeps nothing */ }
  document.documentElement.dataset.theme = kept ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
})();
