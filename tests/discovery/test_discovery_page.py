"""What the page of a discovery says first."""

from nearkin.discovery.report import lead


def test_the_first_paragraph_says_what_was_asked_and_found():
    known = [f"k{number}" for number in range(14)]
    number = "estimated by silhouette; the interval is 2 to 4"
    assert lead("gcd", known, 1, 1200, [700, 450], 50, number) == (
        "1 image of 14 known classes (k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11 and 2 "
        "more) came with a label; 1,200 came without. Of these, 1,150 were clustered into 2 novel "
        "classes, and 50 were assigned to known classes. The number of novel classes was "
        "estimated by silhouette; the interval is 2 to 4."
    )
    disjoint = lead("ncd", ["dog"], 9, 1, [1], 0, "given")
    assert "All unlabeled images were assumed novel and clustered into 1 novel class." in disjoint
    assert "assigned to known" not in disjoint
