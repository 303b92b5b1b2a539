"""Train the digits DiT by flow matching and write its checkpoint and the log of its loss.

    python -m jagg_fx.models.train_digits --steps 4000

Loss (Lipman et al., arXiv 2210.02747; Liu et al., arXiv 2209.03003): `|v_theta(z_t, t, c) - (eps - x0)|^2` averaged
over pixels, `z_t = (1 - t) x0 + t eps`, `t = sigmoid(n)`, `n ~ N(0, 1)` as in SD3 (arXiv 2403.03206). One label in
ten is replaced by the null class. The checkpoint holds the exponential moving average of the weights in float16.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from tqdm import trange

from jagg_fx.models.digits_dit import CHECKPOINT, NULL_CLASS, DigitsDiT, digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=256, help="images per step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (cosine to zero)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--out", type=Path, default=CHECKPOINT, help="where the checkpoint goes; the log lies beside it"
    )
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    images, labels = digits()
    model = DigitsDiT()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps - warmup),
        ],
        [warmup],
    )
    log, running, began = [], 0.0, time.perf_counter()
    bar = trange(args.steps, desc="flow matching")
    for step in bar:
        rows = torch.randint(len(images), (args.batch,))
        x0, label = images[rows], labels[rows]
        label = torch.where(torch.rand(args.batch) < 0.1, NULL_CLASS, label)
        t, noise = torch.randn(args.batch).sigmoid(), torch.randn_like(x0)
        z = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * noise
        loss = (model(z, t, label) - (noise - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
        running += loss.item()
        if (step + 1) % 100 == 0:
            log.append({"step": step + 1, "loss": running / 100, "seconds": round(time.perf_counter() - began, 1)})
            bar.set_postfix(loss=f"{running / 100:.4f}")
            running = 0.0

    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.half() for name, value in average.state_dict().items()}, args.out)
    config = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name != "out"
    }
    payload = {"torch": torch.__version__, "config": config, "loss": log}
    args.out.with_suffix(".log.json").write_text(json.dumps(payload, indent=1) + "\n")
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.2f} MB), last loss {log[-1]['loss']:.4f}" if log else "")


if __name__ == "__main__":
    main()
