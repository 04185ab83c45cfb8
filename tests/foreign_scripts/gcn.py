"""Graph convolutions on a whole graph: no loader, a sparse adjacency, and a loss on a mask of nodes."""

import torch
import torch.nn.functional as F
from run_log import Log, arguments
from torch import nn

args = arguments(steps=40)
nodes, features, hidden, classes = (60, 16, 8, 3) if args.is_tiny else (2700, 1433, 64, 7)


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(features, hidden), GraphConv(hidden, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs):
        x, adjacency = inputs
        x = self.dropout(F.relu(self.gc1(x, adjacency)))
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


def normalized_adjacency(edges):
    edges = torch.cat([edges, edges.flip(0), torch.arange(nodes).repeat(2, 1)], dim=1).unique(dim=1)
    degree = torch.zeros(nodes).index_add_(0, edges[0], torch.ones(edges.size(1)))
    weights = (degree[edges[0]] * degree[edges[1]]).rsqrt()
    return torch.sparse_coo_tensor(edges, weights, (nodes, nodes), is_coalesced=True, check_invariants=True)


torch.manual_seed(42)
labels = torch.randint(classes, (nodes,))
x = torch.randn(nodes, features) + F.one_hot(labels, features)
adjacency = normalized_adjacency(torch.randint(nodes, (2, 4 * nodes)))
train_mask = torch.arange(nodes) % 3 != 0
model, log = GCN(), Log()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for _ in range(args.steps):
    model.train()
    optimizer.zero_grad()
    output = model((x, adjacency))
    loss = F.nll_loss(output[train_mask], labels[train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        F.nll_loss(model((x, adjacency))[~train_mask], labels[~train_mask])
    log.note(loss=loss.item())
log.dump()
