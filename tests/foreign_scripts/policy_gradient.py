"""Policy gradient on a balanced pole: one call of the policy for each action, and no loader."""

import math

import torch
import torch.nn.functional as F
from run_log import Log, arguments
from torch import nn, optim
from torch.distributions import Categorical

args = arguments(steps=40)
hidden, most = (32, 12) if args.is_tiny else (128, 60)


class Pole:
    """Pole on a cart, integrated by Euler's method. An episode has a fixed number of actions."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self):
        self.state = (torch.rand(4, generator=self.generator) - 0.5) * 0.1
        return self.state

    def step(self, action):
        x, speed, angle, turning = self.state.tolist()
        force = 10.0 if action else -10.0
        push = (force + 0.05 * turning**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        pull = push - 0.05 * turn * math.cos(angle) / 1.1
        self.state = torch.tensor(
            [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turning, turning + 0.02 * turn]
        )
        return self.state, 1.0 if abs(angle) < 0.2 else -1.0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.dropout, self.affine2 = nn.Linear(4, hidden), nn.Dropout(0.6), nn.Linear(hidden, 2)

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


def returns_of(rewards, gamma=0.99):
    returns = []
    for reward in reversed(rewards):
        returns.insert(0, reward + gamma * (returns[0] if returns else 0.0))
    values = torch.tensor(returns)
    return (values - values.mean()) / (values.std() + 1e-6)


torch.manual_seed(543)
env, policy, log = Pole(543), Policy(), Log()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
for _ in range(args.steps):
    state, log_probs, rewards = env.reset(), [], []
    for _ in range(most):
        choices = Categorical(policy(state.unsqueeze(0)))
        action = choices.sample()
        log_probs.append(choices.log_prob(action))
        state, reward = env.step(action.item())
        rewards.append(reward)
    losses = [-log_prob * value for log_prob, value in zip(log_probs, returns_of(rewards), strict=True)]
    optimizer.zero_grad()
    loss = torch.cat(losses).sum()
    loss.backward()
    optimizer.step()
    log.note(loss=loss.item())
log.dump()
