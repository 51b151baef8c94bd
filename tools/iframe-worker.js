// Search in a site that is read from files. Browsers start no Worker for a file, so its script runs in a hidden frame instead.
// The name of this file tells the offline plugin of the theme not to load such a script from the network.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.IFrameWorker = window.IFrameWorker;
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise(resolve => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, location);
        script.onload = resolve;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
