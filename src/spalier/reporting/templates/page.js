"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (css, root = document) => Array.from(root.querySelectorAll(css));
  const data = JSON.parse($("data").textContent);
  const tip = $("tip");
  const state = { task: null, from: null, timer: 0 };
  document.documentElement.classList.add("js");

  // -- tips --------------------------------------------------------------------------------------------------------

  const tipped = (node) => (node instanceof Element ? node.closest("[aria-label].point, [aria-label].tipped") : null);

  const centre = (mark) => {
    const box = mark.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  };

  // all points that lie where this one does, the upper ones first
  function stack(mark) {
    if (!mark.matches(".dot")) return [mark];
    const [x, y] = centre(mark);
    const near = all(".dot.point", mark.closest("svg")).filter((other) => {
      const [a, b] = centre(other);
      return Math.hypot(a - x, b - y) < 4;
    });
    return near.reverse();
  }

  function said(mark) {
    return mark.getAttribute("aria-label").split("\n").map((line, place) => {
      const row = document.createElement("div");
      row.textContent = line;
      row.className = place ? "" : "first";
      return row;
    });
  }

  function showTip(mark, x, y) {
    const marks = stack(mark);
    tip.replaceChildren(...marks.slice(0, 5).flatMap(said));
    if (marks.length > 5) tip.append(`and ${marks.length - 5} more`);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.max(6, Math.min(x + 14, document.documentElement.clientWidth - box.width - 6));
    const top = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(6, top)}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  document.addEventListener("pointermove", (event) => {
    const mark = tipped(event.target);
    if (mark) showTip(mark, event.clientX, event.clientY);
    else hideTip();
  });
  document.addEventListener("pointerleave", hideTip);
  window.addEventListener("scroll", hideTip, { passive: true });

  // -- the task that is shown ---------------------------------------------------------------------------------------

  const index = new Map(data.tasks.map((task, place) => [task.key, place]));
  const ofRun = (run) => data.tasks.filter((task) => task.run === run);

  function show(task) {
    state.task = task;
    for (const node of all(".run")) node.hidden = Number(node.dataset.run) !== task.run;
    for (const node of all("[data-of]")) node.hidden = node.dataset.of !== task.key;
    for (const node of all(".point")) node.classList.toggle("chosen", node.dataset.task === task.key);
    prune(task);
    const mates = ofRun(task.run);
    const slider = $("step");
    slider.max = String(mates.length - 1);
    slider.value = String(mates.indexOf(task));
    slider.setAttribute("aria-valuetext", task.density);
    slider.closest("label").hidden = $("play").hidden = mates.length < 2;
    $("before").disabled = index.get(task.key) === 0;
    $("after").disabled = index.get(task.key) === data.tasks.length - 1;
    $("at").textContent = task.said;
    const select = $("choose").querySelector("select");
    select.value = String(task.run);
  }

  function prune(task) {
    const run = all(".run")[task.run];
    if (task.step === null) return;
    for (const leaf of all("[data-cut]", run)) leaf.classList.toggle("gone", Number(leaf.dataset.cut) <= task.step);
    const counts = data.networks[task.run];
    for (const svg of all("figure.network svg", run)) {
      svg.classList.add("stepping");
      for (const node of all("text.heading", svg)) node.textContent = `density ${task.density}`;
      all("text.count", svg).forEach((node, layer) => {
        node.textContent = `${counts[layer][2][task.step]} / ${counts[layer][1]}`;
      });
      all(".branch .target", svg).forEach((node, layer) => {
        const [name, channels, left] = counts[layer];
        node.setAttribute("aria-label", `${name}\n${left[task.step]} of ${channels} channels at density ${task.density}`);
      });
    }
  }

  function choose(task, { go = false } = {}) {
    if (!task) return;
    show(task);
    history.replaceState(null, "", `#task=${encodeURIComponent(task.key)}`);
    if (go) {
      const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
      $("tasks").scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
    }
  }

  function follow() {
    const match = /^#task=(.*)$/.exec(window.location.hash);
    if (!match) return false;
    let key = "";
    try {
      key = decodeURIComponent(match[1]);
    } catch {
      return false;
    }
    if (!index.has(key)) return false;
    show(data.tasks[index.get(key)]);
    return true;
  }

  const next = (by) => {
    const place = index.get(state.task.key) + by;
    stop();
    choose(data.tasks[Math.max(0, Math.min(place, data.tasks.length - 1))]);
  };

  // -- pruning as one looks on ----------------------------------------------------------------------------------------

  function stop() {
    window.clearInterval(state.timer);
    state.timer = 0;
    $("play").textContent = "Prune";
  }

  function play() {
    if (state.timer) return stop();
    const mates = ofRun(state.task.run);
    let place = mates.indexOf(state.task);
    if (place === mates.length - 1) choose(mates[(place = 0)]);
    $("play").textContent = "Stop";
    state.timer = window.setInterval(() => {
      place += 1;
      choose(mates[place]);
      if (place >= mates.length - 1) stop();
    }, 800);
  }

  function wire() {
    const select = $("choose").querySelector("select");
    data.runs.forEach((name, run) => {
      if (!ofRun(run).length) return;
      const option = document.createElement("option");
      option.value = String(run);
      option.textContent = name;
      select.append(option);
    });
    $("choose").hidden = select.options.length < 2;
    select.addEventListener("change", () => {
      stop();
      const mates = ofRun(Number(select.value));
      const same = mates.find((task) => task.density === state.task.density);
      choose(same || mates[mates.length - 1]);
    });
    $("step").addEventListener("input", (event) => {
      stop();
      choose(ofRun(state.task.run)[Number(event.target.value)]);
    });
    $("before").addEventListener("click", () => next(-1));
    $("after").addEventListener("click", () => next(1));
    $("play").addEventListener("click", play);
  }

  // -- points: pointer and keyboard -----------------------------------------------------------------------------------

  function focusable() {
    for (const svg of all("figure > svg")) {
      all(".point", svg).forEach((point, place) => {
        point.setAttribute("tabindex", place ? "-1" : "0");
        point.setAttribute("role", point.dataset.task ? "button" : "img");
      });
    }
  }

  // a click on points that lie on each other goes to the next one each time; keys reach each by itself
  function chosenOf(point, byPointer) {
    if (!byPointer) return point.dataset.task;
    const keys = [...new Set(stack(point).map((mark) => mark.dataset.task).filter(Boolean))];
    const at = keys.indexOf(state.task.key);
    return at < 0 ? point.dataset.task : keys[(at + 1) % keys.length];
  }

  document.addEventListener("click", (event) => {
    const point = event.target instanceof Element ? event.target.closest("[data-task]") : null;
    if (!point) return;
    stop();
    state.from = point;
    choose(data.tasks[index.get(chosenOf(point, event.detail > 0))], { go: true });
  });

  document.addEventListener("focusin", (event) => {
    const mark = tipped(event.target);
    if (!mark || !mark.matches(":focus-visible")) return;
    const box = mark.getBoundingClientRect();
    showTip(mark, box.right, box.bottom - 12);
  });
  document.addEventListener("focusout", hideTip);

  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  document.addEventListener("keydown", (event) => {
    const point = event.target instanceof Element ? event.target.closest(".point") : null;
    if (event.key === "Escape") {
      hideTip();
      stop();
      if (state.from && !point) state.from.focus();
    } else if (point && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      point.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    } else if (point && event.key in steps) {
      event.preventDefault();
      const points = all(".point", point.closest("svg"));
      const to = points[(points.indexOf(point) + steps[event.key] + points.length) % points.length];
      points.forEach((each) => each.setAttribute("tabindex", each === to ? "0" : "-1"));
      to.focus();
    }
  });

  focusable();
  if (data.tasks.length) {
    wire();
    if (!follow()) show(data.tasks[data.start]);
    window.addEventListener("hashchange", follow);
  }
})();
