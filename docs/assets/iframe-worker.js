// Search works in pages opened from the disk, too: browsers start no worker there, so a hidden frame runs its script.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #isLoaded;

    constructor(address) {
      super();
      this.#frame.hidden = true;
      document.documentElement.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.#receive(data);
      inside.importScripts = (...all) => Promise.all(all.map((each) => this.#load(each)));
      this.#isLoaded = this.#load(address);
    }

    postMessage(data) {
      const { contentWindow } = this.#frame;
      const event = new contentWindow.MessageEvent("message", { data });
      this.#isLoaded.then(() => contentWindow.dispatchEvent(event));
    }

    terminate() {
      this.#frame.remove();
    }

    #receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    #load(address) {
      const script = this.#frame.contentDocument.createElement("script");
      script.src = address;
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
        this.#frame.contentDocument.head.append(script);
      });
    }
  };
}
