"""The papers' equations over Python numbers: one loop per sum, exact sums, no tensor, no trick.

Vectors are lists of floats, matrices are lists of rows. The objectives are compared with these; how,
and on what, stands at the end.
"""

import cmath
import itertools
import math
from decimal import Decimal

import torch
import torch.nn.functional as F


def dot(u, v):
    return math.fsum(a * b for a, b in zip(u, v, strict=True))


def mean(values):
    return math.fsum(values) / len(values)


def normalized(v):
    """The vector over its length; hypot does not overflow where a sum of squares would."""
    length = math.hypot(*v)
    return [x / length if length else 0.0 for x in v]


def columns(rows):
    return [list(column) for column in zip(*rows, strict=True)]


# Contrast


def mismatch(query, key, others, temperature):
    """-log of the key's softmax among the key and the others, without cancellation."""
    best = dot(query, key)
    return math.log1p(math.fsum(math.exp((dot(query, k) - best) / temperature) for k in others))


def info_nce(query, key, negatives, temperature, same=None):
    """He et al. 2020, equation 1, where `same` are not negatives."""
    same = same or [[False] * len(negatives)] * len(query)
    others = [[n for n, own in zip(negatives, row) if not own] for row in same]
    return mean([mismatch(*pair, rest, temperature) for *pair, rest in zip(query, key, others)])


def relational_distillation(student, teacher, keys, student_temperature, teacher_temperature):
    """Fang et al. 2021, equations 3 to 5: the dictionary is the queue and the teacher's own vector."""
    losses = []
    for z_s, z_t in zip(student, teacher, strict=True):
        dictionary = [*keys, z_t]
        weights = [math.exp(dot(z_t, d) / teacher_temperature) for d in dictionary]
        scores = [math.exp(dot(z_s, d) / student_temperature) for d in dictionary]
        total, whole = math.fsum(weights), math.fsum(scores)
        losses.append(-math.fsum(w / total * math.log(x / whole) for w, x in zip(weights, scores)))
    return mean(losses)


def gram(student, teacher):
    """Simeoni et al. 2025, section 4.2, with images for patches, and a mean for the sum."""
    pairs = itertools.product(range(len(student)), repeat=2)
    of = lambda z, i, j: dot(z[i], z[j])
    return mean([(of(student, i, j) - of(teacher, i, j)) ** 2 for i, j in pairs])


def in_batch(query, key, temperature):
    """The same where the negatives are the other keys of the batch."""
    own = [[i == j for j in range(len(key))] for i in range(len(key))]
    return info_nce(query, key, key, temperature, own)


def nt_xent(a, b, temperature):
    """Chen et al. 2020, equation 1 and algorithm 1: views 2k and 2k + 1 are of one image."""
    z = list(itertools.chain.from_iterable(zip(a, b)))
    losses = []
    for i in range(len(z)):
        partner = i + 1 if i % 2 == 0 else i - 1
        others = [z[k] for k in range(len(z)) if k not in (i, partner)]
        losses.append(mismatch(z[i], z[partner], others, temperature))
    return mean(losses)


def sup_con(a, b, label, temperature):
    """Khosla et al. 2020, equation 2: the mean over P(i), the views of the class of i but i itself.

    Of images that have a label, and among these alone.
    """
    taught = [row for row, number in enumerate(label) if number >= 0]
    a, b, label = ([rows[row] for row in taught] for rows in (a, b, label))
    z, classes = a + b, label + label
    losses = []
    for i, anchor in enumerate(z):
        others = [k for k in range(len(z)) if k != i]
        logits = {k: dot(anchor, z[k]) / temperature for k in others}
        total = math.log(math.fsum(map(math.exp, logits.values())))
        losses.append(mean([total - logits[p] for p in others if classes[p] == classes[i]]))
    return mean(losses) if losses else 0.0


def soft_match(logits, target):
    """-sum_j t_j log softmax_j, the mean over the rows."""
    losses = []
    for row, weights in zip(logits, target):
        top = max(row)
        total = top + math.log(math.fsum(math.exp(x - top) for x in row))
        losses.append(math.fsum(t * (total - x) for t, x in zip(weights, row)))
    return mean(losses) if losses else 0.0


def nce(query, key, noise, temperature, normalizer, num_images):
    """Wu et al. 2018, equations 4 to 7: P_n is 1/n for every image, and m noise rows a query."""
    expected = len(noise) / num_images  # m P_n

    def p(row, q):
        return math.exp(dot(row, q) / temperature) / normalizer

    losses = []
    for q, k in zip(query, key):
        own = math.log1p(expected / p(k, q))  # -log h, with h = P / (P + m P_n)
        others = math.fsum(math.log1p(p(v, q) / expected) for v in noise)  # -log(1 - h)
        losses.append(own + others)
    return mean(losses)


# Agreement


def alignment(prediction, target):
    """Grill et al. 2020, equation 2, as a squared distance of unit vectors."""
    pairs = zip(prediction, target)
    return mean([math.fsum((a - b) ** 2 for a, b in zip(p, z)) for p, z in pairs])


def byol(prediction, target):
    """The same with the normalization: 2 - 2 <p, z> / (|p| |z|)."""
    return alignment([normalized(p) for p in prediction], [normalized(z) for z in target])


def centered(values):
    return [x - mean(values) for x in values]


def barlow_twins(a, b, off_diagonal, eps=1e-5):
    """Zbontar et al. 2021, equations 1 and 2: the correlation of every feature with every one.

    `eps` is added to the biased variances, as the batch normalization of its code does.
    """
    size = len(a)
    a, b = ([centered(f) for f in columns(z)] for z in (a, b))
    loss = []
    for i, u in enumerate(a):
        for j, v in enumerate(b):
            lengths = [math.sqrt(dot(w, w) + size * eps) for w in (u, v)]
            c = dot(u, v) / (lengths[0] * lengths[1])
            loss.append((1 - c) ** 2 if i == j else off_diagonal * c**2)
    return math.fsum(loss)


def vicreg(a, b, invariance, variance, covariance):
    """Bardes et al. 2022, equations 1 to 6, with the reduction of its code.

    s is the mean over samples and features, v the mean over features and views, and c the sum over
    views; variances and covariances are over n - 1, and .0001 is added under the root.
    """
    n, d = len(a), len(a[0])
    s = math.fsum((x - y) ** 2 for u, v in zip(a, b) for x, y in zip(u, v)) / (n * d)
    hinges, squares = [], []
    for view in (a, b):
        features = [centered(f) for f in columns(view)]
        for i, u in enumerate(features):
            hinges.append(max(0.0, 1 - math.sqrt(dot(u, u) / (n - 1) + 1e-4)))
            squares += [(dot(u, v) / (n - 1)) ** 2 for j, v in enumerate(features) if i != j]
    return invariance * s + variance * mean(hinges) + covariance * math.fsum(squares) / d


def sigreg(z, directions):
    """Balestriero & LeCun 2025, algorithm 1, with complex numbers on both sides of zero."""
    points = [-5 + 10 * k / 16 for k in range(17)]
    statistics = []
    for a in directions:
        errors = []
        for t in points:
            wave = sum(cmath.exp(1j * t * dot(a, v)) for v in z) / len(z)
            gauss = math.exp(-(t**2) / 2)
            errors.append(abs(wave - gauss) ** 2 * gauss)
        inner = math.fsum(errors[1:-1])
        statistics.append(len(z) * 10 / 16 * (inner + (errors[0] + errors[-1]) / 2))
    return mean(statistics)


# Transport


def sinkhorn(scores, epsilon, iterations):
    """Caron et al. 2020, as its code: prototypes first, samples last; decimals never overflow."""
    size, num = len(scores), len(scores[0])
    q = [[(Decimal(x) / Decimal(epsilon)).exp() for x in row] for row in scores]
    total = sum(map(sum, q))
    q = [[x / total for x in row] for row in q]
    for _ in range(iterations):
        masses = [sum(column) for column in zip(*q)]
        q = [[x / mass / num for x, mass in zip(row, masses)] for row in q]
        q = [[x / sum(row) / size for x in row] for row in q]
    return [[float(x * size) for x in row] for row in q]


# Discovery


def close(features, threshold):
    """Zhong et al. 2021, section 3.1: alike where the cosine is above the threshold."""
    rows = [normalized(f) for f in features]
    return [[dot(u, v) > threshold for v in rows] for u in rows]


def same_ranks(features, top):
    """Han et al. 2020, section 3.2: alike where the sets of the largest features are the same."""
    sets = [set(sorted(range(len(f)), key=lambda i: -f[i])[:top]) for f in features]
    return [[u == v for v in sets] for u in sets]


def pairwise_bce(a, b, same):
    """Zhong et al. 2021, equation 3, over all ordered pairs, with the 1e-7 of its code."""
    pairs = [(dot(p, q), alike) for p, row in zip(a, same) for q, alike in zip(b, row)]
    return mean([-math.log((x if alike else 1 - x) + 1e-7) for x, alike in pairs])


def consistency(a, b):
    """Mean squared difference of two views' probabilities, over samples and classes."""
    return mean([(x - y) ** 2 for u, v in zip(a, b) for x, y in zip(u, v)])


def classify(logits, label):
    """Cross-entropy, the mean over the images whose label is not -1."""
    known = [(row, y) for row, y in zip(logits, label) if y != -1]
    losses = [math.log(math.fsum(math.exp(x - row[y]) for x in row)) for row, y in known]
    return mean(losses) if losses else 0.0


def mean_entropy(probabilities):
    """Wen et al. 2023: the entropy of the mean of the rows."""
    return -math.fsum(q * math.log(q) for q in map(mean, columns(probabilities)) if q)


def ramp(progress, until):
    """Laine and Aila 2017: exp(-5 (1 - t/T)^2), and 1 from T on."""
    return math.exp(-5 * (1 - min(progress, until) / until) ** 2) if until else 1.0


def neighborhood_loss(own, others, own_weight, num_neighbors):
    """Zhong et al. 2021, equations 5 to 7, for one query: weight l(z, z') + (1 - weight) l(z, rho).

    `own` is the logit of its other view, `others` those of the queue; rho are the largest of these.
    Without any the first term is all there is.
    """
    total = math.log(math.fsum(map(math.exp, [own, *others])))
    rho = sorted(others, reverse=True)[:num_neighbors]
    if not rho:
        return total - own
    return own_weight * (total - own) + (1 - own_weight) * mean([total - x for x in rho])


def official_targets(row, own_weight, num_neighbors):
    """As the authors' code: the own column competes for a place, and is then given its weight."""
    order = sorted(range(len(row)), key=lambda j: -row[j])[:num_neighbors]
    target = [(1 - own_weight) / num_neighbors if j in order else 0.0 for j in range(len(row))]
    target[0] = own_weight
    return target


def supervised_loss(own, others, alike):
    """Zhong et al. 2021, equation 8, for one query: the mean over its other view and its class."""
    total = math.log(math.fsum(map(math.exp, [own, *others])))
    return mean([total - own] + [total - x for x, same in zip(others, alike) if same])


def mixed_negatives(query, novel, known, easy, drawn, mix, num_hard):
    """Zhong et al. 2021, equations 9 to 11: all mixtures built, those most like the query kept.

    Each of a query's `easy` novel keys is mixed, in each of the draws, with the known key `drawn` for
    it, once per share of the novel key in `mix`.
    """
    hardest = []
    for q, places, draws, shares in zip(query, easy, drawn, mix):
        products = []
        for partners, row in zip(draws, shares):
            for e, partner, several in zip(places, partners, row):
                for mu in several:
                    zeta = [mu * x + (1 - mu) * y for x, y in zip(novel[e], known[partner])]
                    products.append(dot(q, normalized(zeta)))
        hardest.append(sorted(products, reverse=True)[:num_hard])
    return hardest


# Tensors to compare them on


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def vectors(count, dim, seed=0):
    """Random unit vectors."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64))


def agree(result, expected, rtol, atol=0.0):
    expected = torch.as_tensor(expected, dtype=result.dtype)
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


def gradients(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


def shuffled(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def lists(tensors):
    return [x.tolist() for x in tensors]
