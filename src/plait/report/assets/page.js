(() => {
  const root = document.documentElement;

  // Light or dark: what the system prefers, until the button is pressed.
  const button = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  // Charts: their colours are custom properties of the page, so a change of theme needs no redrawing.
  const views = [];
  for (const script of document.querySelectorAll("script.spec")) {
    const box = script.previousElementSibling.firstElementChild;
    vegaEmbed(box, JSON.parse(script.textContent), { renderer: "svg", actions: false, tooltip: { theme: "plait" } })
      .then((result) => views.push(result.view))
      .catch((error) => { box.textContent = `This chart could not be drawn: ${error.message}`; console.error(error); });
  }

  // Bring the lines of a layer or a family forward.
  let pressed = "";
  const choose = (name) => {
    for (const view of views) if ("chosen" in view.getState().signals) view.signal("chosen", name).runAsync();
  };
  for (const item of document.querySelectorAll("[data-line]")) {
    const name = item.dataset.line;
    for (const event of ["pointerenter", "focus"]) item.addEventListener(event, () => choose(name));
    for (const event of ["pointerleave", "blur"]) item.addEventListener(event, () => choose(pressed));
    if (item.tagName !== "BUTTON") continue;
    item.setAttribute("aria-pressed", "false");
    item.addEventListener("click", () => {
      pressed = pressed === name ? "" : name;
      for (const other of document.querySelectorAll("button[data-line]"))
        other.setAttribute("aria-pressed", String(other.dataset.line === pressed));
      choose(pressed || name);
    });
  }

  // What a block of a layout holds.
  const tip = document.getElementById("tip");
  const show = (item) => {
    const title = Object.assign(document.createElement("b"), { textContent: item.dataset.title });
    const table = document.createElement("table");
    for (const line of item.dataset.facts.split("\n")) {
      const [key, value] = line.split("\t");
      const row = table.insertRow();
      row.append(Object.assign(document.createElement("th"), { textContent: key, scope: "row" }));
      row.insertCell().textContent = value;
    }
    tip.replaceChildren(title, table);
    tip.hidden = false;
    const box = item.getBoundingClientRect();
    const left = Math.min(box.left, root.clientWidth - tip.offsetWidth - 8);
    const below = box.bottom + tip.offsetHeight + 8 < root.clientHeight;
    tip.style.left = `${scrollX + Math.max(8, left)}px`;
    tip.style.top = `${scrollY + (below ? box.bottom + 6 : box.top - tip.offsetHeight - 6)}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const item of document.querySelectorAll(".strip li")) {
    for (const event of ["pointerenter", "focus"]) item.addEventListener(event, () => show(item));
    for (const event of ["pointerleave", "blur"]) item.addEventListener(event, hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // Paper cannot be clicked.
  addEventListener("beforeprint", () => { for (const item of document.querySelectorAll("details")) item.open = true; });
})();
