"""A GPU in cells: torch in a session, a fresh cell for each call, and many cells on one GPU.

TORCH names the site-packages of a virtual environment of this Python that has torch.
"""

import os

from cellwright import PolicyError, Sandbox, SandboxResult

# The launcher imports torch once. It must not call the GPU: that makes what no fork can share.
TORCH = os.environ.get("TORCH", "")
POLICY = {"extends": "strict", "python": {"path": [TORCH], "preload": ["torch"]}} if TORCH else {}

TRAIN = """
import torch
torch.manual_seed(7)
x = torch.randn(4096, 32, device="cuda")
y = (x ** 2).sum(1, keepdim=True)
net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
adam = torch.optim.Adam(net.parameters(), 1e-3)
"""
STEP = """
for _ in range(200):
    loss = torch.nn.functional.mse_loss(net(x), y)
    adam.zero_grad(); loss.backward(); adam.step()
loss.item()
"""
CALL = "import torch\ntorch.arange({n}, device='cuda').sum().item()"


def main() -> None:
    try:
        sandbox = Sandbox(policy=POLICY, gpu=True, pool=4)
    except PolicyError as error:  # says what is missing
        print(f"no GPU here: {str(error).splitlines()[0]}")
        return
    with sandbox:
        print("devices:", ", ".join(sandbox.plan.devices))
        if not TORCH:
            print("name the site-packages of torch in TORCH")
            return
        with sandbox.session() as session:  # keeps its tensors on the GPU between calls
            session.execute(TRAIN)
            for _ in range(3):
                print("loss", session.execute(STEP).value)
        # Each call in a new cell, four of them on the GPU at once.
        for result in sandbox.map([CALL.format(n=n) for n in range(1000, 9000, 1000)], at_once=4):
            if isinstance(result, SandboxResult):  # always, unless return_errors is on
                peak = result.usage.gpu_memory_peak_bytes
                print(result.value, "no NVML" if peak is None else f"{peak >> 20} MiB on the GPU")


if __name__ == "__main__":
    main()
